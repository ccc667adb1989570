"""Variables and gradients as arrays for strategies, on TensorFlow: eagerly, and as nodes of a tf.function.

In a graph one node asks at each update whether the strategy has work. If so, a branch of a condition reads the
variables, a second node works on copies of them, and operations of the graph assign the results. So nothing is read or
assigned where nothing is due.

A variable's memory may be shared with tensors that have been read from it. So nothing is written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.variables import inside
from hvdlite.tensorflow_graph import gpu
from hvdlite.tensorflow_graph.framework import densified
from hvdlite.tensorflow_graph.graph import aligned_copy, node, refuse_compiled, tensorflow_errors, to_tensors

LAST = "_hvdlite_strategy"
"""The attribute of graphs that holds the last operation of a strategy: the next one follows it."""


def choose(which: Callable[[], int], branches: Sequence[Callable[[], list[Gradient]]]) -> list[Gradient]:
    """Return the gradients of one branch, now or when the graph runs.

    Args:
        which: Returns the number of the branch. In a graph it is called each time that the graph runs.
        branches: Functions that return gradients of the same variables.

    Raises:
        NotImplementedError: In a graph, one branch has a gradient where another has none.
        RuntimeError: The graph is for XLA.
    """
    if tf.executing_eagerly():
        return branches[which()]()
    refuse_compiled()
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies(getattr(graph, LAST, [])):
        (number,), _ = node(lambda: [np.array(which(), np.int32)], [], [tf.TensorSpec((), tf.int32)], "hvdlite_reach")
    kept: list[list[bool]] = []

    def present(branch: Callable[[], list[Gradient]]) -> list[tf.Tensor]:
        found = branch()
        kept.append([gradient is not None for gradient in found])
        return [*(tf.identity(densified(each)) for each in found if each is not None), tf.identity(number)]

    *results, done = tf.switch_case(number, [partial(present, branch) for branch in branches])
    if any(each != kept[0] for each in kept):
        raise NotImplementedError(
            "a variable has a gradient on some ranks only, which a strategy that averages gradients in some updates "
            "cannot follow in a graph: give zeros (tf.zeros_like(variable)) instead of None"
        )
    setattr(graph, LAST, [done.op])
    remaining = iter(results)
    return [next(remaining) if there else None for there in kept[0]]


def change(
    due: Callable[[], bool],
    work: Callable[[Sequence[Array]], None],
    variables: Sequence[Variable],
    seen: Sequence[tf.Tensor | tf.IndexedSlices],
) -> None:
    """If `due`, have `work` change variables, now or when the graph runs. Waits for other ranks if `work` does.

    Args:
        due: Returns whether `work` is to be called. In a graph it is called each time that the graph runs.
        work: Changes the first of its arrays, which are the variables', in place. The others are those of `seen`.
        variables: The variables, which get the new values.
        seen: Gradients, dense or sparse.

    Raises:
        RuntimeError: The graph is for XLA.
    """
    own = [inside(variable) for variable in variables]

    def changed(*arrays: Array) -> list[Array]:
        copies = list(map(aligned_copy, arrays[: len(own)]))
        work([*copies, *arrays[len(own) :]])
        return copies

    def inputs() -> list[tf.Tensor]:
        return [*(variable.read_value() for variable in own), *map(densified, seen)]

    if not tf.executing_eagerly():
        in_graph(due, changed, own, inputs)
        return
    with tensorflow_errors():
        results = to_tensors(changed(*gpu.arrays_of(inputs()))) if due() else []
    for variable, result in zip(own, results, strict=False):
        variable.assign(result)


def in_graph(
    due: Callable[[], bool],
    changed: Callable[..., list[Array]],
    variables: Sequence[tf.Variable],
    inputs: Callable[[], list[tf.Tensor]],
) -> None:
    """`change` in a graph.

    Args:
        due: As for `change`.
        changed: Returns new arrays for the variables.
        variables: TensorFlow's own.
        inputs: Returns the tensors that `changed` gets as arrays.
    """
    refuse_compiled()
    graph = tf.compat.v1.get_default_graph()
    with tf.control_dependencies(getattr(graph, LAST, [])):
        (is_due,), _ = node(lambda: [np.array(due())], [], [tf.TensorSpec((), tf.bool)], "hvdlite_strategy_due")

    def work() -> tf.Tensor:
        given, dtypes = inputs(), [variable.dtype for variable in variables]
        specs = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
        results, _ = node(changed, given, specs, "hvdlite_strategy", device=gpu.device_for(given, dtypes))
        for variable, result in zip(variables, results, strict=True):
            variable.assign(result)
        return tf.constant(True)

    setattr(graph, LAST, [tf.cond(is_due, work, lambda: tf.constant(False)).op])
