"""`DistributedOptimizer` for both of TensorFlow's kinds: Keras optimizers, and TF1's, which compute gradients too.

A TF1 optimizer's `compute_gradients` is replaced on the instance, so that `minimize`, and scripts that compute, clip
and apply, get reduced gradients; slots, savers and isinstance go on working.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import tensorflow as tf

from hvdlite.api import frameworks
from hvdlite.gradients.lists import Gradients, Settings, check_name, settings_of
from hvdlite.gradients.variables import add_to
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op
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
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    replica_check: str | None = None,
) -> OptimizerT:
    """Make the optimizer's gradients those of all ranks. Returns the same optimizer object.

    optimizer: a Keras optimizer (see `hvdlite.keras.DistributedOptimizer`, which explains the arguments) or a
    `tf.compat.v1.train.Optimizer`: its compute_gradients, and so its minimize, then returns reduced gradients.
    use_locking: accepted for Horovod's sake. Collective.
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
            replica_check=replica_check,
        )  # fmt: skip
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise TypeError(
            "DistributedOptimizer takes an optimizer of Keras or of tf.compat.v1.train first, not a "
            f"{type(optimizer).__name__}: DistributedOptimizer(optimizer)"
        )
    settings = settings_of(
        op=op, predivide=gradient_predivide_factor, compression=compression,
        sparse_as_dense=sparse_as_dense, num_groups=num_groups, groups=groups, scale_local=scale_local_gradients,
        process_set=process_set,
        replica_check=replica_check,
    )  # fmt: skip
    attach(optimizer, settings, backward_passes_per_step, average_aggregated_gradients)
    return optimizer


def attach(optimizer: Any, settings: Settings, passes: int, average: bool) -> None:
    """Replace the optimizer's methods on the instance. Raises RuntimeError where it is attached already."""
    before: Attachment | None = vars(optimizer).get("_hvdlite")
    if before is not None:
        before.gradients.require_replaceable()
    private_api.require_all()
    attachment = Attachment(optimizer, settings, passes, average)
    optimizer.__dict__.update(
        _hvdlite=attachment,
        compute_gradients=untouched(attachment.compute_gradients),
        apply_gradients=untouched(attachment.apply_gradients),
        register_local_var=partial(add_to, attachment.local),
    )


class Attachment:
    """One TF1 optimizer's gradients, reduced."""

    def __init__(self, optimizer: Any, settings: Settings, passes: int, average: bool) -> None:
        self.optimizer = optimizer
        self.passes = LocalGradientAggregationHelper(passes, self.reduced, settings.sparse_as_dense, average)
        title = f"DistributedOptimizer({type(optimizer).__name__})"
        self.gradients = Gradients(settings, framework.BORDER, "optimizer", title, self.passes.sums)
        self.local: list[Any] = []
        self.computed = False

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """(gradient, variable) pairs, reduced over all ranks: with several passes per step the sums, at the last."""
        pairs = type(self.optimizer).compute_gradients(self.optimizer, *args, **kwargs)
        self.gradients.require_alive()
        self.computed = True
        variables = [variable for _, variable in pairs]
        grads = self.passes.compute_gradients([grad for grad, _ in pairs], variables)
        return list(zip(grads, variables, strict=True))

    def reduced(self, grads: list[Any], variables: list[Any]) -> list[Any]:
        return self.gradients.reduce(grads, variables, self.local)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients that compute_gradients has returned; nothing between the last passes of two steps."""
        self.gradients.require_alive()
        if not self.computed:
            raise RuntimeError(
                "apply_gradients without compute_gradients: these gradients were not reduced over the ranks. Compute "
                "them with this optimizer's compute_gradients (or minimize), or with hvd.DistributedGradientTape and "
                "an optimizer that is not distributed."
            )
        apply, given = type(self.optimizer).apply_gradients.__get__(self.optimizer), (list(grads_and_vars), *args)
        return self.passes.apply_gradients(lambda: apply(*given, **kwargs), self.optimizer, *given, **kwargs)
