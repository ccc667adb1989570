"""Several passes per step: gradients are summed on each rank, at the last pass reduced over the ranks, and applied.

The name is Horovod's, which used it within its optimizers, as this package does for TF1's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.lists import LocalVariables, dense
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.variables import add_to
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.tensorflow.common import require_registered, size_of
from hvdlite.tensorflow_graph import framework
from hvdlite.tensorflow_graph.graph import untouched

Gradients = list[Gradient]


class LocalGradientAggregationHelper:
    """Sums of gradients over `backward_passes_per_step` calls of `compute_gradients`.

    allreduce_func: called as f(gradients, variables) with the sums, at the last pass; returns the reduced ones.
    average_aggregated_gradients: averages over the passes in place of sums. scale_local_gradients: gradients of local
    variables are divided by the number of ranks in process_set. Sparse gradients need sparse_as_dense. rank,
    optimizer_type, name: accepted for Horovod's sake.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self, backward_passes_per_step: int, allreduce_func: Callable[[Gradients, list[Variable]], Gradients],
        sparse_as_dense: bool, average_aggregated_gradients: bool, rank: int = 0,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY, process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True, name: str = "",
    ) -> None:
        require_registered(process_set)
        self.sums = Accumulator(backward_passes_per_step, average_aggregated_gradients)
        self.allreduce, self.sparse_as_dense = allreduce_func, sparse_as_dense
        self.process_set, self.scale_local = process_set, scale_local_gradients
        self.local: list[Variable] = []
        self.last: bool | tf.Tensor = True
        """Whether a step follows the gradients that were computed last; a tensor in a graph."""

    def register_local_var(self, var: object) -> None:
        """Keep this variable's gradient, or those of several, out of the reduction. Raises ValueError for others."""
        add_to(self.local, var)

    def reduced(self, grads: Gradients, variables: list[Variable]) -> Gradients:
        if not self.local:
            return self.allreduce(grads, variables)
        divisor = size_of(self.process_set) if self.scale_local else 1
        return LocalVariables(self.local, divisor, framework.FRAMEWORK).around(self.allreduce, grads, variables)

    @untouched
    def compute_gradients(self, grads: Sequence[Gradient], vars: Sequence[Variable]) -> Gradients:
        """At the last pass the reduced sums; before it zeros, which are not to be applied. None stays None."""
        variables = list(vars)
        if self.sums.passes == 1:
            return self.reduced(list(grads), variables)
        given = {i: dense(self.sparse_as_dense, framework.FRAMEWORK, grad, variables[i])
                 for i, grad in enumerate(grads) if grad is not None}  # fmt: skip
        self.last = framework.accumulate(self.sums, given)

        def totals() -> dict[int, Gradient]:
            taken = framework.accumulated(self.sums, given)
            reduced = self.reduced(list(taken.values()), [variables[i] for i in taken])
            return dict(zip(taken, reduced, strict=True))

        results = tf.cond(self.last, totals, lambda: {i: tf.zeros_like(grad) for i, grad in given.items()})
        return [results.get(i) for i in range(len(variables))]

    @untouched
    def apply_gradients(
        self, apply_grads_closure: Callable[[], tf.Operation | None], optimizer: tf.compat.v1.train.Optimizer,
        *args: object, **kwargs: object,
    ) -> tf.Operation | None:
        """Call the closure where a step follows; otherwise only count the pass, as the closure does: in global_step, or
        the optimizer's iterations.

        args, kwargs: those of the optimizer's `apply_gradients`: (gradient, variable) pairs, global_step, name. Returns
        an operation in a graph.
        """
        global_step = kwargs.get("global_step", args[1] if len(args) > 1 else None)
        if self.sums.passes == 1:
            return apply_grads_closure()
        if tf.executing_eagerly():
            return apply_grads_closure() if self.last else count_pass(optimizer, global_step)

        def after(operation: tf.Operation | None) -> tf.Tensor:
            with tf.control_dependencies([] if operation is None else [operation]):
                return tf.constant(True)

        return tf.cond(
            self.last, lambda: after(apply_grads_closure()), lambda: after(count_pass(optimizer, global_step))
        ).op


def count_pass(optimizer: tf.compat.v1.train.Optimizer, global_step: object) -> tf.Operation | None:
    """Returns an operation in a graph, or None."""
    if global_step is not None:
        return tf.compat.v1.assign_add(global_step, 1)
    return optimizer.iterations.assign_add(1) if hasattr(optimizer, "iterations") else None
