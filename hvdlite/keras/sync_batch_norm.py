"""Batch normalization over the batches of all ranks: equal to one big batch on one process.

Two all-reduces per forward pass, of count and sum per channel, then of the squared deviations from the common mean, so
that nothing cancels; their gradients are all-reduces, too. The gradients of gamma and beta stay local: the optimizer
averages them, as all others.
"""

from __future__ import annotations

from typing import Any

import keras
from keras import ops as K

from hvdlite.gradients.variables import unnumbered
from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.backends import name as backend
from hvdlite.keras.functions import allreduce
from hvdlite.ops import Sum


@keras.saving.register_keras_serializable("hvdlite")
class SyncBatchNormalization(keras.layers.BatchNormalization):  # type: ignore[misc]
    """`keras.layers.BatchNormalization` with the statistics of all ranks' batches, which may differ in size.

    In training every rank must call it equally often; evaluation communicates nothing. fused: Horovod's argument, which
    must be False. Raises NotImplementedError on JAX, whose compiled step has no gradients of host callbacks.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        if fused is not False:
            raise ValueError("SyncBatchNormalization: fused must be False")
        if backend() == "jax":
            raise NotImplementedError("SyncBatchNormalization serves Keras on TensorFlow and PyTorch, not on JAX")
        private_api.MOMENTS.get()
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> Any:
        """Mean and variance per channel. inputs: as Keras gives them, in float32 where the layer computes in less."""
        if runtime.size() == 1:
            return super()._moments(inputs, mask)
        channels, chosen = self.axis % len(inputs.shape), K.ones_like(inputs)
        axes = [axis for axis in range(len(inputs.shape)) if axis != channels]
        if mask is not None:
            chosen = chosen * K.cast(K.expand_dims(mask, -1), inputs.dtype)
        sums = K.stack([K.sum(chosen, axes), K.sum(inputs * chosen, axes)])
        count, total = K.unstack(allreduce(sums, op=Sum, name=f"{unnumbered(self.name)} sums"))
        count = K.maximum(count, 1)  # where every rank's batch is masked out
        mean = total / count
        shape = [1 if axis in axes else -1 for axis in range(len(inputs.shape))]
        squares = K.sum(K.square(inputs - K.reshape(mean, shape)) * chosen, axes)
        squares = allreduce(squares, op=Sum, name=f"{unnumbered(self.name)} squares")
        return mean, squares / count
