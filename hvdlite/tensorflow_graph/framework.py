"""The functions of `gradients.framework.Framework` for TensorFlow. The Protocol describes each of them.

In a graph, each bucket is one node. The node copies the bucket's gradients into the arena as soon as they are computed,
and lets full buckets leave if the reducer allows that. The last node sends the other buckets, waits for all ranks and
returns the results. Control edges keep the plan's order.

    Bytes copied per gradient byte
    graph, borrowed results   1: the results lie in the arena until the next round; an optimizer applies them at once
    graph, other results      2
    eager                     2
    on a GPU                  2, all on the GPU
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np
import tensorflow as tf

from hvdlite.arrays import Array, is_host
from hvdlite.gradients.accumulator import Accumulator
from hvdlite.gradients.exchange import Exchange, reduce_now
from hvdlite.gradients.framework import Framework
from hvdlite.gradients.replica_check import checksum
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.use import Use
from hvdlite.gradients.variables import inside
from hvdlite.lanes.gpu_side import Gpu
from hvdlite.tensorflow_graph import gpu as _gpu
from hvdlite.tensorflow_graph import private_api
from hvdlite.tensorflow_graph.compression import Compression
from hvdlite.tensorflow_graph.graph import aligned_copy, in_order, node, tensorflow_errors, to_tensors, untouched

__all__ = ["Compression", "in_order", "untouched"]
FRAMEWORK = cast(Framework, sys.modules[__name__])
"""This module as an object that `gradients/` can hold."""
Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
USERS = "_hvdlite_users"
"""The attribute of graphs that holds the operations that use borrowed results."""


def use_of(gradient: Gradient) -> Use:
    if gradient is None:
        return Use.UNUSED
    return Use.SPARSE if isinstance(gradient, tf.IndexedSlices) else Use.DENSE


def dtype_of(gradient: tf.Tensor) -> str:
    return str(gradient.dtype.name)


def zeros(shape: Sequence[int], dtype: str) -> tf.Tensor:
    return tf.zeros(shape, dtype)


def densified(gradient: Gradient) -> Gradient:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def divided(gradient: tf.Tensor | tf.IndexedSlices, divisor: int) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / divisor, gradient.indices, gradient.dense_shape)
    return gradient / divisor


def gpu_of(variables: Sequence[Variable]) -> Gpu | None:
    """Return the GPU that all the variables are on; None if there is no such GPU, without CuPy, and in sessions."""
    return _gpu.gpu_of([str(inside(variable).device) for variable in variables])


def values_of(variables: Sequence[Variable]) -> list[int] | None:
    if in_session(variables):
        return None
    return [checksum(inside(each).numpy()) for each in variables]  # a graph's Python node runs in eager mode, too


def in_session(variables: Sequence[Variable]) -> bool:
    """Return whether a session holds one of the variables, or one of them is no variable."""
    return any(private_api.in_session(inside(variable)) for variable in variables)


def traced(gradients: Sequence[tf.Operation]) -> bool:
    return not tf.executing_eagerly()


def wait() -> None:
    """Return at once: when a tf.function returns, its Python nodes have run."""


@contextlib.contextmanager
def using(results: Sequence[Gradient]) -> Iterator[None]:
    """Record the operations that the block adds to the graph; they use borrowed results.

    They run after the round, also those that need no gradient (weight decay): ranks compare weights in the round. The
    graph's next round, which overwrites the results, waits for these operations.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    with tf.control_dependencies([tf.convert_to_tensor(g.values if isinstance(g, tf.IndexedSlices) else g)
                                  for g in results if g is not None]):  # fmt: skip
        yield
    setattr(graph, USERS, graph.get_operations()[before:])


def refuse_replicas() -> None:
    """Raise NotImplementedError inside a tf.distribute strategy of several replicas.

    Each replica would have a round of its own, before TensorFlow adds up the replicas' gradients.
    """
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise NotImplementedError(
            f"hvd.DistributedOptimizer does not work under a tf.distribute strategy of {replicas} replicas: start one "
            "process per device instead (hvdliterun -np), without a strategy [HVD314]"
        )


def reduce(exchange: Exchange, gradients: Sequence[Gradient], borrow: bool = False) -> list[Gradient]:
    """Return the gradients reduced over all ranks, in the same order; None where no rank has a gradient.

    If `borrow`, the next round overwrites the results: use them within `using(results)` only.
    """
    dense = [densified(gradients[i]) if use is not Use.SPARSE else None for i, use in enumerate(exchange.division.uses)]
    after: Sequence[tf.Operation] = ()
    if tf.executing_eagerly():
        with tensorflow_errors():
            results = reduce_now(exchange, dense, to_array(exchange), copies)
    else:
        results, after = reduce_in_graph(exchange, dense, borrow)
    for index in exchange.division.sparse:
        results[index], after = gather(exchange, index, gradients[index], after)
    return results


def to_array(exchange: Exchange) -> Callable[[tf.Tensor], Array]:
    """Return the function that turns eager gradients into arrays on the exchange's device."""
    gpu = exchange.contents.gpu
    if gpu is None:
        return _gpu.on_host
    _gpu.wait_for(_gpu.NAMES[gpu.number])
    return lambda gradient: _gpu.array_on(gpu, gradient)


def copies(views: Sequence[Array]) -> list[tf.Tensor]:
    """Return results as tensors that outlive the round."""
    return to_tensors([aligned_copy(view) if is_host(view) else view for view in views])


def reduce_in_graph(
    exchange: Exchange, gradients: Sequence[Gradient], borrow: bool
) -> tuple[list[Gradient], Sequence[tf.Operation]]:
    """Make the nodes of one round. Returns their results, and operations that run after all of the nodes.

    If a variable had no gradient on any rank when the exchange was made, its result stays None.
    """
    after = getattr(tf.compat.v1.get_default_graph(), USERS, [])
    results: list[Gradient] = [None] * len(gradients)
    used = [index for index in exchange.division.dense if exchange.division.uses[index] is Use.DENSE]
    for number, members in enumerate(exchange.division.buckets):
        mine = [index for index in members if gradients[index] is not None]
        first, last = number == 0, number == len(exchange.division.buckets) - 1
        wanted = used if last else []
        outputs_of = [spec_of(exchange, index) for index in wanted]
        asks = last and exchange.watched.in_session
        with tf.control_dependencies(after):
            outputs, done = node(
                visit(exchange, mine, wanted, first, last, borrow),
                [gradients[index] for index in mine],
                [*outputs_of, *([tf.TensorSpec((), tf.bool)] if asks else [])],
                name=f"hvdlite_gradients_{exchange.lane.user}_{number + 1}",
                device=_gpu.NAMES[exchange.contents.gpu.number] if exchange.contents.gpu else None,
            )
        after = [done]
        if asks:
            after = [compared(exchange, outputs.pop())]
            with tf.control_dependencies(after):
                outputs = list(map(tf.identity, outputs))
        for index, output in zip(wanted, outputs, strict=True):
            results[index] = output
    return results, after


def compared(exchange: Exchange, due: tf.Tensor) -> tf.Tensor:
    """Compare the ranks' variables if `due`; only then read a session's variables. Returns a tensor to depend on."""
    present = exchange.watched.present()

    def compare() -> tf.Tensor:
        def call(*arrays: Array) -> list[Array]:
            exchange.watched.compare(dict(zip(present, arrays, strict=True)))
            return [np.array(True)]

        values = [inside(variable).read_value() for variable in present.values()]
        name = f"hvdlite_{exchange.name}_comparison".replace(".", "_")
        return node(call, values, [tf.TensorSpec((), tf.bool)], name=name)[0][0]

    return tf.cond(due, compare, lambda: tf.constant(True))


def spec_of(exchange: Exchange, index: int) -> tf.TensorSpec:
    """Return the shape and dtype of a variable's gradient in a graph."""
    spec = exchange.contents.specs[index]
    return tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype))


def visit(
    exchange: Exchange, mine: Sequence[int], wanted: Sequence[int], first: bool, last: bool, borrow: bool
) -> Callable[..., list[Array]]:
    """Return the function that one bucket's node calls.

    Args:
        exchange: The exchange.
        mine: The indices of the bucket's variables that have a gradient on this rank.
        wanted: The indices of the variables whose results the node returns.
        first: Whether the bucket is the round's first.
        last: Whether the bucket is the round's last.
        borrow: Whether the results may stay in the arena.
    """
    # The graph has no result for a variable that no rank uses, so what a lossy compressor has kept must not be sent.
    absent = Use.UNUSED if exchange.contents.store else Use.DENSE

    def call(*arrays: Array) -> list[Array]:
        if first:
            exchange.begin()
        for index, array in zip(mine, arrays, strict=True):
            exchange.put(index, array)
        due = last and exchange.finish(absent)
        results = [exchange.result(index) for index in wanted]
        if not borrow and exchange.contents.gpu is None:
            results = list(map(aligned_copy, results))
        return [*results, np.array(due)] if last and exchange.watched.in_session else results

    return call


def noted(note: Callable[[float], None], value: tf.Tensor, gradients: Sequence[Gradient]) -> list[Gradient]:
    """Call `note` with a number before a round; in a graph each time that it runs.

    Args:
        note: The function.
        value: The number.
        gradients: The gradients of the round.

    Returns:
        The gradients. In a graph they depend on the call.
    """
    if tf.executing_eagerly():
        note(float(value))
        return list(gradients)

    def call(value: Array) -> list[Array]:
        note(float(np.asarray(value)))
        return []

    _, done = node(call, [value], name="hvdlite_loss_scale")
    with tf.control_dependencies([done]):
        return [each if each is None else tf.nest.map_structure(tf.identity, each, expand_composites=True)
                for each in gradients]  # fmt: skip


def gather(
    exchange: Exchange, index: int, gradient: Gradient, after: Sequence[tf.Operation]
) -> tuple[tf.IndexedSlices, Sequence[tf.Operation]]:
    """Gather all ranks' rows and values of one sparse gradient. This rank's gradient may also be dense, or None.

    Args:
        exchange: The exchange.
        index: The variable's index in the exchange.
        gradient: This rank's gradient.
        after: In a graph, operations that run before the gathering.

    Returns:
        The gathered gradient, and operations that run after the gathering.
    """
    spec = exchange.contents.specs[index]
    if gradient is None:  # in eager mode the row -1 means "no gradient"; if all ranks send it, the result is None
        count = int(tf.executing_eagerly())
        rows, values = tf.fill([count], tf.constant(-1, tf.int64)), tf.zeros([count, *spec.shape[1:]], spec.dtype)
    elif isinstance(gradient, tf.IndexedSlices):
        rows, values = tf.cast(gradient.indices, tf.int64), tf.convert_to_tensor(gradient.values)
    else:
        rows, values = tf.range(spec.shape[0], dtype=tf.int64), gradient
    if tf.executing_eagerly():
        with tensorflow_errors():
            all_rows, all_values = exchange.gather(index, np.asarray(rows), np.asarray(values))
            given = np.asarray(all_rows, np.int64) >= 0
            if given.size and not given.any():
                return None, after
            rows, values = map(tf.convert_to_tensor, (all_rows[given], all_values[given]))
    else:
        with tf.control_dependencies(after):
            (rows, values), done = node(
                lambda *arrays: exchange.gather(index, *arrays),
                [rows, values],
                [tf.TensorSpec((None,), tf.int64), tf.TensorSpec((None, *spec.shape[1:]), tf.as_dtype(spec.dtype))],
            )  # fmt: skip
        after = [done]
    return _gpu.slices(values, rows, tf.constant(spec.shape, tf.int64)), after


def accumulate(accumulator: Accumulator, gradients: Mapping[int, tf.Tensor]) -> bool | tf.Tensor:
    """Add gradients to the sums of earlier passes. Returns whether this was the last pass; in a graph as a tensor."""
    if tf.executing_eagerly():
        return accumulator.add({i: _gpu.on_host(gradient) for i, gradient in gradients.items()})
    indices = list(gradients)

    def add(*arrays: Array) -> list[Array]:
        return [np.array(accumulator.add(dict(zip(indices, arrays, strict=True))))]

    (last,), _ = node(add, list(gradients.values()), [tf.TensorSpec((), tf.bool)])
    return last


def accumulated(accumulator: Accumulator, gradients: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    """Return the sums; in a graph only of the variables that have a gradient in the last pass."""
    if tf.executing_eagerly():
        return {i: tf.convert_to_tensor(total) for i, total in accumulator.take().items()}
    indices, like = list(gradients), list(gradients.values())
    totals, _ = node(lambda: accumulator.take_of(indices), [], [tf.TensorSpec(g.shape, g.dtype) for g in like])
    return dict(zip(indices, totals, strict=True))
