"""`DistributedOptimizer` for both of TensorFlow's kinds of optimizers: Keras optimizers and TF1 optimizers.

hvdlite replaces a TF1 optimizer's `compute_gradients` on the instance. So `minimize`, and scripts that compute, clip
and apply gradients, get reduced gradients. Slots, savers and isinstance work as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TypeVar

import tensorflow as tf

from hvdlite.api import frameworks
from hvdlite.gradients.lists import Gradients
from hvdlite.gradients.settings import Arguments, Settings, check_name, settings_of
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.variables import add_to
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op
from hvdlite.strategies import Strategy
from hvdlite.tensorflow.aggregation import LocalGradientAggregationHelper
from hvdlite.tensorflow_graph import framework, private_api
from hvdlite.tensorflow_graph.compression import Compression
from hvdlite.tensorflow_graph.graph import untouched

OptimizerT = TypeVar("OptimizerT")


def DistributedOptimizer(
    optimizer: OptimizerT,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: object = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
    sharded: bool = False,
    strategy: Strategy | None = None,
) -> OptimizerT:
    """Make the optimizer apply gradients reduced over all ranks. Collective.

    Args:
        optimizer: A Keras optimizer, or a `tf.compat.v1.train.Optimizer`. Methods are replaced on this object. A TF1
            optimizer's `compute_gradients`, and so its `minimize`, then waits for all ranks.
        name: Accepted for Horovod's sake.
        use_locking: Accepted for Horovod's sake.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which gradients travel.
            Or a lossy compressor between hosts: `hvd.Compression.topk(ratio=0.01)`, `randomk`, `int8`, `onebit`,
            `powersgd`, or your own `Codec`.
        sparse_as_dense: Whether sparse gradients (embeddings) travel dense.
        backward_passes_per_step: The number of passes whose gradients are summed on each rank before each reduction.
        op: Average or Sum.
        gradient_predivide_factor: Divides gradients before the sum, and multiplies the sum. With Average only.
        average_aggregated_gradients: Whether gradients are averaged over these passes instead of summed.
        num_groups: Deprecated: a number for `groups`.
        groups: A number of groups, or lists of variables that travel together.
        process_set: The ranks that reduce together.
        scale_local_gradients: Whether gradients of local variables are divided by the number of ranks.
        replica_check: The reaction to ranks that train with different weights: "error", "warn" or "off". None: the
            setting HVDLITE_REPLICA_CHECK, else "error".
        sharded: For Keras optimizers, whether each rank keeps a part of the state only; see `hvdlite.keras`.
        strategy: For Keras optimizers, how the ranks' models are kept together; see `hvdlite.keras`.

    Returns:
        The same optimizer object.

    Raises:
        TypeError: `optimizer` is no optimizer, or an argument has a wrong type.
        ValueError: An argument cannot be right, before init(), or the process set is not registered.
        RuntimeError: The optimizer is attached already.
        NotImplementedError: `op` is Adasum, or `sharded` is true for a TF1 optimizer.
        MismatchError: On every rank, with a diff, if the ranks' optimizers or models differ.
    """
    check_name(name)
    frameworks.refuse_legacy(optimizer)
    if frameworks.family(optimizer) == "keras":
        from hvdlite.keras.optimizer import DistributedOptimizer as distributed

        return distributed(
            optimizer, name=name, device_dense=device_dense, device_sparse=device_sparse, compression=compression,
            sparse_as_dense=sparse_as_dense, gradient_predivide_factor=gradient_predivide_factor, op=op,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients, num_groups=num_groups, groups=groups,
            process_set=process_set, scale_local_gradients=scale_local_gradients,
            replica_check=replica_check, sharded=sharded, strategy=strategy,
        )  # fmt: skip
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "DistributedOptimizer takes an optimizer of Keras or of tf.compat.v1.train first, not a "
            f"{type(optimizer).__name__}: DistributedOptimizer(optimizer)"
        )
    if sharded or strategy is not None:
        raise NotImplementedError("sharded= and strategy= serve Keras optimizers, not those of tf.compat.v1.train")
    settings = settings_of(Arguments(
        compression=compression, sparse_as_dense=sparse_as_dense, op=op,
        gradient_predivide_factor=gradient_predivide_factor, num_groups=num_groups, groups=groups,
        process_set=process_set, scale_local_gradients=scale_local_gradients, replica_check=replica_check,
    ))  # fmt: skip
    attach(optimizer, settings, backward_passes_per_step, average_aggregated_gradients)
    return optimizer


def attach(optimizer: tf.compat.v1.train.Optimizer, settings: Settings, passes: int, average: bool) -> None:
    """Replace the optimizer's methods on the instance. Raises RuntimeError if the optimizer is attached already."""
    before: Tf1Attachment | None = vars(optimizer).get("_hvdlite")
    if before is not None:
        before.gradients.require_replaceable()
    private_api.require_all()
    attachment = Tf1Attachment(optimizer, settings, passes, average)
    optimizer.__dict__.update(
        _hvdlite=attachment,
        compute_gradients=untouched(attachment.compute_gradients),
        apply_gradients=untouched(attachment.apply_gradients),
        register_local_var=partial(add_to, attachment.local),
    )


class Tf1Attachment:
    """The methods that hvdlite puts on a TF1 optimizer, and their state.

    Attributes:
        optimizer: The optimizer.
        passes: The sums over several passes.
        gradients: Reduces lists of gradients.
        local: The variables whose gradients stay this rank's own.
        computed: Whether `compute_gradients` has been called; if not, `apply_gradients` would get unreduced gradients.
    """

    def __init__(self, optimizer: tf.compat.v1.train.Optimizer, settings: Settings, passes: int, average: bool) -> None:
        self.optimizer = optimizer
        self.passes = LocalGradientAggregationHelper(passes, self.reduced, settings.sparse_as_dense, average)
        title = f"DistributedOptimizer({type(optimizer).__name__})"
        self.gradients = Gradients(settings, framework.FRAMEWORK, "optimizer", title, self.passes.sums)
        self.local: list[Variable] = []
        self.computed = False

    def compute_gradients(self, *args: object, **kwargs: object) -> list[tuple[Gradient, Variable]]:
        """Return (gradient, variable) pairs, reduced over all ranks. The last of several passes returns the sums."""
        pairs = type(self.optimizer).compute_gradients(self.optimizer, *args, **kwargs)
        self.gradients.require_alive()
        self.computed = True
        variables = [variable for _, variable in pairs]
        grads = self.passes.compute_gradients([grad for grad, _ in pairs], variables)
        return list(zip(grads, variables, strict=True))

    def reduced(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """Return the gradients, reduced over all ranks."""
        return self.gradients.reduce(grads, variables, self.local)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Gradient, Variable]], *args: object, **kwargs: object
    ) -> tf.Operation | None:
        """Apply gradients that `compute_gradients` returned, after the last pass of a step; else count the pass."""
        self.gradients.require_alive()
        if not self.computed:
            raise RuntimeError(
                "apply_gradients without compute_gradients: these gradients were not reduced over the ranks. Compute "
                "gradients with this optimizer's compute_gradients (or minimize). Or use hvd.DistributedGradientTape "
                "and an optimizer that is not distributed. [HVD312]"
            )
        apply, given = type(self.optimizer).apply_gradients.__get__(self.optimizer), (list(grads_and_vars), *args)
        return self.passes.apply_gradients(lambda: apply(*given, **kwargs), self.optimizer, *given, **kwargs)
