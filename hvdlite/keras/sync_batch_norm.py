"""Batch normalization over the batches of all ranks: equal to one big batch on one process.

Each forward pass has two all-reduces. The first adds up count and sum per channel. The second adds up squared
deviations from the common mean, which loses no digits. The gradients of these all-reduces are all-reduces, too. The
optimizer averages the gradients of gamma and beta over the ranks, as all others.
"""

from __future__ import annotations

import keras
from keras import ops as K

from hvdlite.gradients.tensors import Tensor
from hvdlite.gradients.variables import unnumbered
from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.backends import name as backend
from hvdlite.keras.functions import allreduce
from hvdlite.ops import Sum


@keras.saving.register_keras_serializable("hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """`keras.layers.BatchNormalization` with the statistics of all ranks' batches.

    The ranks' batches may differ in size. In training, each call waits for all ranks, and every rank must call the
    layer equally often. Evaluation does not communicate.
    """

    def __init__(self, fused: bool = False, **kwargs: object) -> None:
        """
        Args:
            fused: Horovod's argument; must be False.
            **kwargs: As for `keras.layers.BatchNormalization`.

        Raises:
            ValueError: `fused` is true.
            NotImplementedError: Keras runs on JAX: its compiled step has no gradients of host callbacks.
        """
        if fused is not False:
            raise ValueError(f"SyncBatchNormalization: fused={fused!r} must be False")
        if backend() == "jax":
            raise NotImplementedError(
                "SyncBatchNormalization works with Keras on TensorFlow and PyTorch, not on JAX: use "
                "keras.layers.GroupNormalization or keras.layers.LayerNormalization, which need no other ranks' batches"
            )
        private_api.MOMENTS.get()
        super().__init__(**kwargs)

    def _moments(self, inputs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance per channel over all ranks' batches. Waits for all ranks.

        Args:
            inputs: This rank's batch, of float32 also if the layer computes in float16.
            mask: Which samples count; None: all of them.
        """
        if runtime.size() == 1:
            return super()._moments(inputs, mask)  # type: ignore[no-any-return]
        channels, chosen = self.axis % len(inputs.shape), K.ones_like(inputs)
        axes = [axis for axis in range(len(inputs.shape)) if axis != channels]
        if mask is not None:
            chosen = chosen * K.cast(K.expand_dims(mask, -1), inputs.dtype)
        sums = K.stack([K.sum(chosen, axes), K.sum(inputs * chosen, axes)])
        count, total = K.unstack(allreduce(sums, op=Sum, name=f"{unnumbered(self.name)} sums"))
        count = K.maximum(count, 1)  # 0 if the masks leave no sample on any rank
        mean = total / count
        shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
        squares = K.sum(K.square(inputs - K.reshape(mean, shape)) * chosen, axes)
        squares = allreduce(squares, op=Sum, name=f"{unnumbered(self.name)} squares")
        return mean, squares / count
