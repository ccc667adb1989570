"""All-gather, broadcast, all-to-all of TensorFlow tensors, with Horovod's names and gradients: eager and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.gpu_streams import on_host
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Op
from hvdlite.tensorflow.common import (
    averaged,
    collective,
    dense_tensor,
    differentiable,
    named,
    require_registered,
    rows_unknown,
    size_of,
)
from hvdlite.tensorflow_graph.graph import aligned_copy, call, tensorflow_errors, untouched


@dataclass(frozen=True)
class Addend:
    """A part of a tf.IndexedSlices, gathered in order to be added to other ranks' slices.

    Attributes:
        op: The operation of the reduction.
        shape: The dense shape; None where it is unknown.
    """

    op: Op
    shape: tf.Tensor | None


@untouched
def allgather(
    tensor: object,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate all ranks' tensors along the first dimension, in rank order. Waits for all ranks of the process set.

    The gradient is the average of all ranks' gradients, at the rows that this rank contributed.

    Args:
        tensor: A tensor, variable or array of at least one dimension. The first dimension may differ between ranks (0
            is allowed); the other dimensions and the dtype must agree.
        name: The operation's name, equal on all ranks.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        process_set: The ranks that take part.

    Returns:
        A new tensor with the rows of all ranks.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' dtypes or other dimensions differ, or all ranks
            gave scalars; before init(). In a graph, when it runs.
        TypeError: `tensor` is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered.
    """
    return gathered(tensor, name, ignore_name_scope, process_set)


@untouched
def gathered(
    value: object, name: str | None, ignore_name_scope: bool, process_set: ProcessSet, addend: Addend | None = None
) -> tf.Tensor:
    """`allgather`. With an `addend`, ranks that have joined contribute no rows; without one they are an error."""
    require_registered(process_set)
    tensor = dense_tensor(value)
    name = named("Allgather", [tensor], name, ignore_name_scope, process_set)
    shape = None if addend is None or addend.shape is None else tf.cast(addend.shape, tf.int64)
    known = None if shape is None else tf.get_static_value(shape)
    later = [shape] if known is None and shape is not None else []

    def work(array: Array, *shapes: Array) -> list[Array]:
        whole = on_host(shapes[0]).tolist() if shapes else known
        facts = () if addend is None else ops.sparse_facts(addend.op, whole)
        return [ops.allgather(array, name, process_set, addends=addend is not None, facts=facts)]

    def forward(given: tf.Tensor) -> list[tf.Tensor]:
        return call(work, [given, *later], [given.dtype], [rows_unknown(given)], name)

    def backward(grad: tf.Tensor) -> list[tf.Tensor]:
        return [own_rows(grad, tf.shape(tensor)[:1], process_set)]

    return differentiable(forward, backward, [tensor])[0]


def own_rows(grad: tf.Tensor, rows: tf.Tensor, process_set: ProcessSet) -> tf.Tensor:
    """Return this rank's rows of the average of all ranks' gradients. rows: their number, of shape (1,)."""
    mean = averaged(grad, process_set)
    counts = allgather(rows, process_set=process_set)
    return tf.split(mean, counts, num=size_of(process_set))[runtime.group_of(process_set).rank]


@untouched
def grouped_allgather(
    tensors: Sequence[object],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """All-gather several tensors as one operation. Waits for all ranks of the process set. Gradients as `allgather`.

    Args:
        tensors: Tensors as for `allgather`, as many on every rank. For an empty list the ranks do not communicate.
        name: The operation's name, equal on all ranks.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        process_set: The ranks that take part.

    Returns:
        One new tensor per tensor, with the rows of all ranks.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' tensors do not fit together; before init(). In a
            graph, when it runs.
        TypeError: One is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered.
    """
    require_registered(process_set)
    if not tensors:
        return []
    given = [dense_tensor(tensor) for tensor in tensors]
    name = named("GroupedAllgather", given, name, ignore_name_scope, process_set)

    def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
        return [own_rows(g, tf.shape(tensor)[:1], process_set) for g, tensor in zip(grads, given, strict=True)]

    return collective(
        lambda arrays: ops.grouped_allgather(arrays, name, process_set), backward, given, name, rows_unknown
    )


@untouched
def broadcast(
    tensor: object,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return root_rank's tensor on every rank. Waits for all ranks of the process set.

    The gradient is the average of all ranks' gradients on the root, and zeros on the other ranks.

    Args:
        tensor: A tensor, variable or array of the same shape and dtype on every rank.
        root_rank: The global rank that sends its tensor.
        name: The operation's name, equal on all ranks.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        process_set: The ranks that take part.

    Returns:
        A new tensor, on every rank; the argument keeps its value.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if shapes, dtypes or root ranks differ; before init(). In a
            graph, when it runs.
        TypeError: `tensor` is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered.
    """
    require_registered(process_set)
    given = dense_tensor(tensor)
    name = named("Broadcast", [given], name, ignore_name_scope, process_set)

    def work(arrays: Sequence[Array]) -> list[Array]:
        return [ops.broadcast_(aligned_copy(arrays[0]), root_rank, name, process_set)]

    def backward(grad: tf.Tensor) -> list[tf.Tensor]:
        mean = averaged(grad, process_set)
        with tf.control_dependencies([mean]):  # other ranks wait for this rank's part, also where the result is zeros
            return [mean if runtime.rank() == root_rank else tf.zeros_like(mean)]

    return collective(work, backward, [given], name)[0]


@untouched
def alltoall(
    tensor: object,
    splits: object = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Send the first splits[0] rows to rank 0, the next splits[1] rows to rank 1, and so on.

    Waits for all ranks of the process set. Differentiable: the gradients of the rows return to their senders.

    Args:
        tensor: A tensor, variable or array of at least one dimension. The other dimensions and the dtype must agree
            between ranks.
        splits: One whole number per rank: a tensor, array or list, whose sum is at most the number of rows. None: each
            rank gets equally many rows.
        name: The operation's name, equal on all ranks.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        process_set: The ranks that take part.

    Returns:
        A new tensor with the rows that all ranks sent here, in rank order. With splits, also an int32 tensor: how many
        rows each rank sent.

    Raises:
        tf.errors.InvalidArgumentError: `splits` does not fit, or without splits the rows are not divisible. In a graph,
            when it runs.
        tf.errors.FailedPreconditionError: On every rank, if the ranks' dtypes or other dimensions differ; before
            init(). In a graph, when it runs.
        TypeError: `tensor` is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered.
    """
    require_registered(process_set)
    rows = dense_tensor(tensor)
    given = [rows] if splits is None else [rows, tf.convert_to_tensor(splits, tf.int32)]
    name = named("Alltoall", [rows], name, ignore_name_scope, process_set)
    counts: list[tf.Tensor] = []

    def work(array: Array, each: Array | None = None) -> Sequence[Array]:
        result: tuple[Array, Array] = ops.alltoall(array, each, name, process_set)
        return result

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with tensorflow_errors():
            size = size_of(process_set)
        results = call(work, inputs, [rows.dtype, tf.int32], [rows_unknown(rows), [size]], name)
        counts[:] = results[1:]
        return results

    def backward(grad: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor | None]:
        back, _ = alltoall(grad, counts[0], process_set=process_set)
        unsent = tf.shape(rows)[:1] - tf.shape(back)[:1]
        back = tf.concat([back, tf.zeros(tf.concat([unsent, tf.shape(rows)[1:]], 0), back.dtype)], 0)
        return [back, *[None] * (len(given) - 1)]

    output, received = differentiable(forward, backward, given)
    return output if splits is None else (output, received)
