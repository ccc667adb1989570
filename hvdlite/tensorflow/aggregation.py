"""`LocalGradientAggregationHelper`: Horovod's class that adds up gradients of several passes per step.

The last pass reduces the sums over the ranks. hvdlite's TF1 optimizers use it; scripts may, too.
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


class LocalGradientAggregationHelper:
    """Sums of gradients over `backward_passes_per_step` calls of `compute_gradients`.

    Attributes:
        sums: The sums of this step's passes.
        allreduce: The user's function that reduces gradients.
        sparse_as_dense: Whether sparse gradients become dense.
        process_set: The ranks that reduce together.
        scale_local: Whether gradients of local variables are divided by the number of ranks.
        local: The variables whose gradients stay this rank's own.
        last: Whether the last call of `compute_gradients` was the last pass of a step; a tensor in a graph.
    """

    _OPTIMIZER_TYPE_KERAS = "optimizer_type_keras"
    _OPTIMIZER_TYPE_LEGACY = "optimizer_type_legacy"

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[[list[Gradient], list[Variable]], list[Gradient]],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int = 0,
        optimizer_type: str = _OPTIMIZER_TYPE_LEGACY,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        """Make a helper without sums.

        Args:
            backward_passes_per_step: The number of passes per step.
            allreduce_func: Called as f(gradients, variables) with the sums at the last pass; returns as many reduced
                gradients.
            sparse_as_dense: Whether sparse gradients become dense; needed for sparse gradients in several passes.
            average_aggregated_gradients: Whether to average over the passes instead of summing.
            rank: Accepted for Horovod's sake.
            optimizer_type: Accepted for Horovod's sake.
            process_set: The ranks that reduce together.
            scale_local_gradients: Whether gradients of local variables are divided by the number of ranks in the
                process set.
            name: Accepted for Horovod's sake.

        Raises:
            ValueError: The process set is not registered, or the number of passes is not positive.
        """
        require_registered(process_set)
        self.sums = Accumulator(backward_passes_per_step, average_aggregated_gradients)
        self.allreduce, self.sparse_as_dense = allreduce_func, sparse_as_dense
        self.process_set, self.scale_local = process_set, scale_local_gradients
        self.local: list[Variable] = []
        self.last: bool | tf.Tensor = True

    def register_local_var(self, var: object) -> None:
        """Keep the gradients of one or several variables out of the reduction.

        Args:
            var: A variable, or a layer, list or dict of variables.

        Raises:
            ValueError: `var` has no variables.
        """
        add_to(self.local, var)

    def reduced(self, grads: list[Gradient], variables: list[Variable]) -> list[Gradient]:
        """Reduce gradients with the user's function; those of local variables are only divided.

        Args:
            grads: This rank's gradients.
            variables: Their variables, in the same order.

        Returns:
            The gradients, in the same order.
        """
        if not self.local:
            return self.allreduce(grads, variables)
        divisor = size_of(self.process_set) if self.scale_local else 1
        return LocalVariables(self.local, divisor, framework.FRAMEWORK).around(self.allreduce, grads, variables)

    @untouched
    def compute_gradients(self, grads: Sequence[Gradient], vars: Sequence[Variable]) -> list[Gradient]:
        """Add gradients to the sums. The last pass of a step reduces the sums, and waits for all ranks.

        Args:
            grads: This rank's gradients: tf.Tensor, tf.IndexedSlices or None.
            vars: Their variables, in the same order, the same on all ranks.

        Returns:
            One gradient per variable: the reduced sums at the last pass, before it zeros, which `apply_gradients` does
            not apply. None stays None.

        Raises:
            ValueError: A gradient is sparse, there are several passes, and `sparse_as_dense` is False.
        """
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
        self,
        apply_grads_closure: Callable[[], tf.Operation | None],
        optimizer: tf.compat.v1.train.Optimizer,
        *args: object,
        **kwargs: object,
    ) -> tf.Operation | None:
        """Apply the gradients after the last pass of a step. After another pass, only count the pass.

        The pass is counted where the optimizer counts: in `global_step`, or in the optimizer's iterations.

        Args:
            apply_grads_closure: Applies the gradients.
            optimizer: The optimizer.
            *args: The arguments of the optimizer's `apply_gradients`: (gradient, variable) pairs, global_step, name.
            **kwargs: Such arguments by name.

        Returns:
            An operation in a graph; in eager mode what the closure returns, or None.
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
    """Add one to `global_step`, or else to the optimizer's iterations. Returns an operation in a graph, or None."""
    if global_step is not None:
        return tf.compat.v1.assign_add(global_step, 1)
    return optimizer.iterations.assign_add(1) if hasattr(optimizer, "iterations") else None
