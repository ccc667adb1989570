"""All-reduce and reduce-scatter of TensorFlow tensors, with Horovod's names and gradients: eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.gradients.compression import compressor
from hvdlite.gradients.sparse import require_sum
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op, Sum, op_of
from hvdlite.tensorflow import movement
from hvdlite.tensorflow.common import (
    How,
    collective,
    dense_tensor,
    named,
    reduced,
    reduced_together,
    require_registered,
    rows_unknown,
    size_of,
)
from hvdlite.tensorflow_graph import gpu
from hvdlite.tensorflow_graph.compression import Compression
from hvdlite.tensorflow_graph.graph import untouched

MAKE_DENSE = "give a dense tensor, tf.convert_to_tensor(slices)"
"""The cure in error texts about tf.IndexedSlices."""


@untouched
def allreduce(
    tensor: object,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """Reduce a tensor over all ranks (Average by default). Waits for all ranks of the process set.

    The gradient is the same reduction of all ranks' gradients.

    An average of integers is exact, truncated toward zero; an average of float16 does not overflow. A Sum overflows as
    in NumPy: integers wrap around. float16 and bfloat16 are added in float32. For booleans, Sum and Max are the logical
    or, Min and Product the logical and.

    Args:
        tensor: A tensor, variable or array of the same shape and dtype on every rank, or a tf.IndexedSlices.
        average: Deprecated: True for op=Average, False for op=Sum.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which the tensor travels.
        op: Average, Sum, Min, Max, Product or Adasum. For tf.IndexedSlices Average or Sum.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.
        ignore_name_scope: Whether the name leaves out the graph's name scope.

    Returns:
        A new tensor; the argument keeps its value. For tf.IndexedSlices the rows and values of all ranks.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' arguments differ. In a graph, when it runs. The
            job can go on.
        NotImplementedError: A tf.IndexedSlices with another `op` or with factors.
        TypeError: `tensor` is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: Before init(), the process set is not registered, or an argument cannot be right.
    """
    runtime.current()
    require_registered(process_set)
    how = How(ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return sparse_allreduce(tensor, how, name)
    chosen = compressor(compression)
    small, context = chosen.compress(dense_tensor(tensor))
    name = named("Allreduce", [small], name, ignore_name_scope, process_set)
    return chosen.decompress(reduced(small, how, name), context)


@untouched
def grouped_allreduce(
    tensors: Sequence[object],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: object = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """Reduce several tensors over all ranks as one operation. Waits for all ranks of the process set.

    Differentiable, and computed, like `allreduce`.

    Args:
        tensors: Tensors as for `allreduce`, as many on every rank; their dtypes may differ. Each tf.IndexedSlices is an
            operation of its own.
        average: Deprecated: True for op=Average, False for op=Sum.
        device_dense: Accepted for Horovod's sake.
        device_sparse: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which the tensors travel.
        op: Average, Sum, Min, Max, Product or Adasum. For tf.IndexedSlices Average or Sum.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        name: The operation's name, equal on all ranks.

    Returns:
        One new tensor per tensor, in the same order.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' arguments differ; before init(). In a graph,
            when it runs. The job can go on.
        NotImplementedError: A tf.IndexedSlices with another `op` or with factors.
        TypeError: One is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered, or an argument cannot be right.
    """
    require_registered(process_set)
    how = How(ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    results: list[tf.Tensor | tf.IndexedSlices] = [None] * len(tensors)
    dense = []
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, tf.IndexedSlices):
            results[i] = sparse_allreduce(tensor, how, name and f"{name}.{i}")
        else:
            dense.append(i)
    if not dense:
        return results
    chosen = compressor(compression)
    packed = [chosen.compress(dense_tensor(tensors[i])) for i in dense]
    small = [tensor for tensor, _ in packed]
    label = named("GroupedAllreduce", small, name, ignore_name_scope, process_set)
    summed = reduced_together(small, how, label)
    for i, result, (_, context) in zip(dense, summed, packed, strict=True):
        results[i] = chosen.decompress(result, context)
    return results


def sparse_allreduce(slices: tf.IndexedSlices, how: How, name: str | None) -> tf.IndexedSlices:
    """Gather all ranks' rows and values; for Average, divide the values by the number of ranks."""
    require_sum(how.op, "tf.IndexedSlices", MAKE_DENSE)
    if (how.prescale, how.postscale) != (1.0, 1.0):
        raise NotImplementedError(f"tf.IndexedSlices with prescale_factor or postscale_factor: {MAKE_DENSE}")
    names = [name and f"{name}.{part}" for part in ("values", "indices")]
    addend = movement.Addend(how.op, slices.dense_shape)
    values, indices = (movement.gathered(part, each, False, how.process_set, addend)
                       for part, each in zip((slices.values, slices.indices), names, strict=True))  # fmt: skip
    if how.op is Average:
        values = values / size_of(how.process_set)
    return gpu.slices(values, indices, slices.dense_shape)


@untouched
def reducescatter(
    tensor: object,
    device_dense: str = "",
    compression: object = Compression.none,
    op: Op | int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Reduce a tensor over all ranks and return this rank's rows. Waits for all ranks of the process set.

    Ranks get consecutive rows in rank order. If the rows are not divisible, the first ranks get one row more. The
    gradient is the ranks' gradients, gathered, with the factors of the reduction.

    Args:
        tensor: A tensor, variable or array of at least one dimension, of the same shape and dtype on every rank.
        device_dense: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which the tensor travels.
        op: Average or Sum.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.
        ignore_name_scope: Whether the name leaves out the graph's name scope.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.

    Returns:
        A new tensor with this rank's rows; the argument keeps its value.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' arguments differ; before init(). In a graph,
            when it runs.
        tf.errors.AbortedError: `op` is neither Average nor Sum.
        tf.errors.InvalidArgumentError: `tensor` is a scalar.
        TypeError: `tensor` is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered, or an argument cannot be right.
    """
    require_registered(process_set)
    how, chosen = summing(op, prescale_factor, postscale_factor, process_set), compressor(compression)
    small, context = chosen.compress(with_rows(tensor))
    name = named("Reducescatter", [small], name, ignore_name_scope, process_set)
    (result,) = scattered([small], how, lambda arrays: [ops.reducescatter(arrays[0], name=name, **vars(how))], name)
    return chosen.decompress(result, context)


@untouched
def grouped_reducescatter(
    tensors: Sequence[object],
    device_dense: str = "",
    compression: object = Compression.none,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Reduce-scatter several tensors as one operation. Waits for all ranks. Rows and gradients as `reducescatter`.

    Args:
        tensors: Tensors as for `reducescatter`, as many on every rank. For an empty list the ranks do not communicate.
        device_dense: Accepted for Horovod's sake.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which the tensors travel.
        op: Average or Sum.
        process_set: The ranks that take part.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.
        name: The operation's name, equal on all ranks.

    Returns:
        One new tensor per tensor, with this rank's rows.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, if the ranks' arguments differ; before init(). In a graph,
            when it runs.
        tf.errors.AbortedError: `op` is neither Average nor Sum.
        tf.errors.InvalidArgumentError: One is a scalar.
        TypeError: One is a tf.RaggedTensor or tf.SparseTensor.
        ValueError: The process set is not registered, or an argument cannot be right.
    """
    require_registered(process_set)
    if not tensors:
        return []
    how, chosen = summing(op, prescale_factor, postscale_factor, process_set), compressor(compression)
    packed = [chosen.compress(with_rows(tensor)) for tensor in tensors]
    small = [tensor for tensor, _ in packed]
    name = named("GroupedReducescatter", small, name, False, process_set)
    results = scattered(small, how, lambda arrays: ops.grouped_reducescatter(arrays, name=name, **vars(how)), name)
    return [chosen.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


def summing(op: Op | int, prescale: float, postscale: float, process_set: ProcessSet) -> How:
    """Return a reduce-scatter's arguments. Raises AbortedError, like Horovod, unless `op` is Average or Sum."""
    chosen = op_of(op)
    if chosen not in (Average, Sum):
        text = f"reducescatter with op={chosen.name}: only Average and Sum are possible; use op=hvd.Average or hvd.Sum"
        raise tf.errors.AbortedError(None, None, text)
    return How(chosen, prescale, postscale, process_set)


def with_rows(value: object) -> tf.Tensor:
    """Return the value as a tensor. Raises InvalidArgumentError for a scalar."""
    tensor = dense_tensor(value)
    if tensor.shape.rank == 0:
        text = "reducescatter needs a tensor of at least one dimension; reshape the scalar to (1,)"
        raise tf.errors.InvalidArgumentError(None, None, text)
    return tensor


def scattered(
    tensors: Sequence[tf.Tensor], how: How, work: Callable[[Sequence[Array]], Sequence[Array]], name: str | None
) -> list[tf.Tensor]:
    """Reduce-scatter the tensors as `work` does; their gradients are gathered."""

    def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
        factor = ops.amplification(**vars(how))
        scaled = [tf.cast(grad, t.dtype) * tf.cast(factor, t.dtype) for grad, t in zip(grads, tensors, strict=True)]
        return movement.grouped_allgather(scaled, process_set=how.process_set)

    return collective(work, backward, tensors, name, rows_unknown)
