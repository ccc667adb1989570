"""All-gather, broadcast, all-to-all of TensorFlow tensors, with Horovod's names and gradients: eager and in graphs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.gpu_streams import on_host
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Op
from hvdlite.tensorflow.common import (
    Tensor,
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

Everyone = global_process_set


@dataclass(frozen=True)
class Addend:
    """A tf.IndexedSlices: how it is added to others, and its dense shape, where that is known."""

    op: Op
    shape: Any


@untouched
def allgather(
    tensor: Tensor, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = Everyone
) -> tf.Tensor:
    """All ranks' tensors concatenated in rank order along the first dimension, which may differ; differentiable. Waits
    for all ranks. Raises tf.errors.FailedPreconditionError on all where dtypes or other dimensions differ."""
    return gathered(tensor, name, ignore_name_scope, process_set)


@untouched
def gathered(
    tensor: Tensor, name: str | None, ignore_name_scope: bool, process_set: ProcessSet, addend: Addend | None = None
) -> tf.Tensor:
    """`allgather`. addend: what is gathered will be added up, so that ranks that have joined add nothing."""
    require_registered(process_set)
    tensor = dense_tensor(tensor)
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
    """The average of all ranks' gradients, at the rows that this rank contributed. rows: how many, of shape (1,)."""
    mean = averaged(grad, process_set)
    counts = allgather(rows, process_set=process_set)
    return tf.split(mean, counts, num=size_of(process_set))[runtime.group_of(process_set).rank]


@untouched
def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = Everyone,
) -> list[tf.Tensor]:
    """`allgather` of several tensors, as many on every rank, as one operation; differentiable. Waits for all ranks."""
    require_registered(process_set)
    if not tensors:
        return list(tensors)
    given = [dense_tensor(tensor) for tensor in tensors]
    name = named("GroupedAllgather", given, name, ignore_name_scope, process_set)

    def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
        return [own_rows(g, tf.shape(tensor)[:1], process_set) for g, tensor in zip(grads, given, strict=True)]

    return collective(
        lambda arrays: ops.grouped_allgather(arrays, name, process_set), backward, given, name, rows_unknown
    )


@untouched
def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = Everyone,
) -> tf.Tensor:
    """root_rank's tensor on every rank, as a new tensor; differentiable: the root receives the average of all ranks'
    gradients, the others zeros. Waits for all ranks. Raises tf.errors.FailedPreconditionError on all where shapes or
    dtypes differ."""
    require_registered(process_set)
    tensor = dense_tensor(tensor)
    name = named("Broadcast", [tensor], name, ignore_name_scope, process_set)

    def work(arrays: Sequence[Array]) -> list[Array]:
        return [ops.broadcast_(aligned_copy(arrays[0]), root_rank, name, process_set)]

    def backward(grad: tf.Tensor) -> list[tf.Tensor]:
        mean = averaged(grad, process_set)
        with tf.control_dependencies([mean]):  # the other ranks wait for it
            return [mean if runtime.rank() == root_rank else tf.zeros_like(mean)]

    return collective(work, backward, [tensor], name)[0]


@untouched
def alltoall(
    tensor: Tensor, splits: Any = None, name: str | None = None, ignore_name_scope: bool = False,
    process_set: ProcessSet = Everyone,
) -> Any:
    """Send the first splits[0] rows to rank 0, the next splits[1] to rank 1, and so on; equal parts without splits.

    Returns what all ranks sent here, in rank order; with splits, also how many rows each did. Differentiable. Raises
    InvalidArgumentError for splits that do not fit.
    """
    require_registered(process_set)
    tensor = dense_tensor(tensor)
    given = [tensor] if splits is None else [tensor, tf.convert_to_tensor(splits, tf.int32)]
    name = named("Alltoall", [tensor], name, ignore_name_scope, process_set)
    counts: list[tf.Tensor] = []

    def work(array: Array, rows: Array | None = None) -> Sequence[Array]:
        result: tuple[Array, Array] = ops.alltoall(array, rows, name, process_set)
        return result

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        with tensorflow_errors():
            size = size_of(process_set)
        results = call(work, inputs, [tensor.dtype, tf.int32], [rows_unknown(tensor), [size]], name)
        counts[:] = results[1:]
        return results

    def backward(grad: tf.Tensor, _: Any) -> list[Any]:
        back, _ = alltoall(grad, counts[0], process_set=process_set)
        unsent = tf.shape(tensor)[:1] - tf.shape(back)[:1]
        back = tf.concat([back, tf.zeros(tf.concat([unsent, tf.shape(tensor)[1:]], 0), back.dtype)], 0)
        return [back, *[None] * (len(given) - 1)]

    output, received = differentiable(forward, backward, given)
    return output if splits is None else (output, received)
