"""All-reduce and reduce-scatter of TensorFlow tensors, with Horovod's names and gradients: eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    Tensor,
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

Everyone = global_process_set
MAKE_DENSE = "give a dense tensor, tf.convert_to_tensor(slices)"


@untouched
def allreduce(
    tensor: Tensor, average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: Op | int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, name: str | None = None, process_set: ProcessSet = Everyone,
    ignore_name_scope: bool = False,
) -> Any:
    """The reduction of all ranks' tensors (Average by default), as a new tensor; differentiable.

    tensor: same shape and dtype on every rank. An average of integers is exact, truncated toward zero; of float16 it
    does not overflow. A Sum overflows as NumPy's: integers wrap around. float16 and bfloat16 are added in float32. Of
    booleans Sum and Max are the logical or, Min and Product the and. tf.IndexedSlices are gathered instead: Average and
    Sum, without factors, else NotImplementedError. device_dense, device_sparse: accepted for Horovod's sake. Raises
    FailedPreconditionError on every rank where the ranks' arguments differ; the job can go on. ValueError before
    init(), and for a process set that is not registered.
    """
    runtime.current()
    require_registered(process_set)
    how = How(ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return sparse_allreduce(tensor, how, name)
    small, context = compressor(compression).compress(dense_tensor(tensor))
    name = named("Allreduce", [small], name, ignore_name_scope, process_set)
    return compression.decompress(reduced(small, how, name), context)


@untouched
def grouped_allreduce(
    tensors: Sequence[Tensor], average: bool | None = None, device_dense: str = "", device_sparse: str = "",
    compression: Any = Compression.none, op: Op | int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = Everyone, ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """The reductions of several tensors, as new tensors, as one operation; differentiable. Arguments as for
    allreduce; tensors may have different dtypes, and tf.IndexedSlices may be among them."""
    require_registered(process_set)
    how = How(ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    results: list[Any] = list(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for i in set(range(len(tensors))) - set(dense):
        results[i] = sparse_allreduce(tensors[i], how, name and f"{name}.{i}")
    if not dense:
        return results
    packed = [compressor(compression).compress(dense_tensor(tensors[i])) for i in dense]
    small = [tensor for tensor, _ in packed]
    label = named("GroupedAllreduce", small, name, ignore_name_scope, process_set)
    summed = reduced_together(small, how, label)
    for i, result, (_, context) in zip(dense, summed, packed, strict=True):
        results[i] = compression.decompress(result, context)
    return results


def sparse_allreduce(slices: tf.IndexedSlices, how: How, name: str | None) -> tf.IndexedSlices:
    """All ranks' rows and values; those of Average are divided by the number of ranks."""
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
    tensor: Tensor, device_dense: str = "", compression: Any = Compression.none, op: Op | int = Average,
    name: str | None = None, process_set: ProcessSet = Everyone, ignore_name_scope: bool = False,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> tf.Tensor:
    """This rank's rows of the reduction of all ranks' tensors, dealt out as evenly as possible; differentiable.

    op: Average or Sum, else AbortedError.
    """
    require_registered(process_set)
    how = summing(op, prescale_factor, postscale_factor, process_set)
    small, context = compressor(compression).compress(with_rows(tensor))
    name = named("Reducescatter", [small], name, ignore_name_scope, process_set)
    (result,) = scattered(
        [small], how, lambda arrays: [ops.reducescatter(arrays[0], name=name, **vars(how))], name
    )
    return compression.decompress(result, context)


@untouched
def grouped_reducescatter(
    tensors: Sequence[Tensor], device_dense: str = "", compression: Any = Compression.none, op: Op | int = Average,
    process_set: ProcessSet = Everyone, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """`reducescatter` of several tensors, as many on every rank, as one; differentiable. Waits for all ranks."""
    require_registered(process_set)
    if not tensors:
        return list(tensors)
    how = summing(op, prescale_factor, postscale_factor, process_set)
    packed = [compressor(compression).compress(with_rows(tensor)) for tensor in tensors]
    small = [tensor for tensor, _ in packed]
    name = named("GroupedReducescatter", small, name, False, process_set)
    results = scattered(
        small, how, lambda arrays: ops.grouped_reducescatter(arrays, name=name, **vars(how)), name
    )
    return [compression.decompress(result, context) for result, (_, context) in zip(results, packed, strict=True)]


def summing(op: Op | int, prescale: float, postscale: float, process_set: ProcessSet) -> How:
    """The arithmetic of a reduce-scatter. Raises AbortedError, as Horovod did, for other operations than two."""
    chosen = op_of(op)
    if chosen not in (Average, Sum):
        text = f"reducescatter with op={chosen.name}: only Average and Sum are possible"
        raise tf.errors.AbortedError(None, None, text)
    return How(chosen, prescale, postscale, process_set)


def with_rows(value: Tensor) -> tf.Tensor:
    """The value as a tensor. Raises InvalidArgumentError for one without rows."""
    tensor = dense_tensor(value)
    if tensor.shape.rank == 0:
        raise tf.errors.InvalidArgumentError(None, None, "reducescatter needs a tensor of at least one dimension")
    return tensor


def scattered(
    tensors: Sequence[tf.Tensor], how: How, work: Callable[[Sequence[Array]], Sequence[Array]], name: str | None
) -> list[tf.Tensor]:
    """Reduce-scatters; the gradients are gathered."""

    def backward(*grads: tf.Tensor) -> list[tf.Tensor]:
        factor = ops.amplification(**vars(how))
        scaled = [tf.cast(grad, t.dtype) * tf.cast(factor, t.dtype) for grad, t in zip(grads, tensors, strict=True)]
        return movement.grouped_allgather(scaled, process_set=how.process_set)  # type: ignore[no-any-return]

    return collective(work, backward, tensors, name, rows_unknown)
