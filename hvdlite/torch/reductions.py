"""All-reduce and reduce of torch tensors.

`allreduce` and `grouped_allreduce` are differentiable, as in Horovod: the gradients are those of the sum of the ranks'
losses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite import ops
from hvdlite.gradients.compression import Compressor, compressor
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op, op_of
from hvdlite.ops.handles import remember
from hvdlite.torch.compression import Compression
from hvdlite.torch.differentiable import differentiable
from hvdlite.torch.tensors import fresh, in_place, laid_out, readable, to_tensor

Everyone = global_process_set


# all-reduce


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """Do `allreduce` in place. Not differentiable. Waits for all ranks of the process set.

    Args:
        tensor: The tensor, of any layout, of the same shape and dtype on every rank. It is overwritten.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        The tensor itself.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        ValueError: Elements of the tensor share memory (expand), or another argument cannot be right.
    """
    array, deliver = in_place(tensor)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return deliver(ops.allreduce_(array, *how))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> int:
    """Start `allreduce_`. Asynchronous: waits for no rank.

    Args:
        tensor: The tensor, as for `allreduce_`. Do not use it before `synchronize(handle)`.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the tensor itself. It raises the errors of `allreduce_`.
    """
    array, deliver = in_place(tensor)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.allreduce_.start(array, *how), deliver)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> int:
    """Start `allreduce`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensor: The tensor, of the same shape and dtype on every rank.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the reduction as a new tensor. It raises the errors of
        `allreduce`.
    """
    return allreduce_async_(fresh(tensor), average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """Reduce all ranks' tensors: (op over ranks of tensor * prescale_factor) * postscale_factor. Differentiable.

    Waits for all ranks of the process set. An average of integers is exact, and truncated toward zero. A sum of
    integers wraps around on overflow, as in NumPy. float16 and bfloat16 are added in float32, and an average of float16
    does not overflow. Of booleans, Sum and Max are the logical or, Min and Product the logical and; they have no
    Average.

    Args:
        tensor: The tensor, of the same shape and dtype on every rank, on the CPU or a CUDA GPU.
        average: Deprecated; use op.
        name: Ranks match calls by name, in whatever order each rank makes them. Calls without a name are matched in
            their order.
        compression: The dtype in which the tensor travels: hvd.Compression.none, fp16 or bf16.
        op: hvd.Average (the default), Sum, Min, Max, Product or Adasum.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        The reduction, as a new tensor with the tensor's layout (channels_last, say).

    Raises:
        MismatchError: The ranks' arguments differ; on every rank. The job can go on.
        ValueError: An argument cannot be right: a dtype that cannot be communicated, say.
        TypeError: `tensor` is no tensor.
    """
    small, context = compressor(compression).compress(tensor)
    how = (ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    if isinstance(small, torch.Tensor) and small.requires_grad and torch.is_grad_enabled():

        def back(grad: torch.Tensor) -> list[torch.Tensor]:
            return [allreduce(grad, None, None, Compression.none, *how)]

        (result,) = differentiable(lambda given: (allreduce_(fresh(given), None, name, *how),), back, [small])
    else:  # mostly metrics: autograd would take 10 us
        result = allreduce_(fresh(small), None, name, *how)
    return compression.decompress(result, context)


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> tuple[torch.Tensor, ...]:
    """Do `grouped_allreduce` in place. Not differentiable. Waits for all ranks of the process set.

    Args:
        tensors: The tensors, of the same shapes and dtypes on every rank. They are overwritten.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.

    Returns:
        The tensors themselves.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        ValueError: Two tensors share memory, or `tensors` is empty, or another argument cannot be right.
    """
    memories = [in_place(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    ops.grouped_allreduce_([array for array, _ in memories], *how)
    return tuple(deliver(None) for _, deliver in memories)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> int:
    """Start `grouped_allreduce_`. Asynchronous: waits for no rank.

    Args:
        tensors: The tensors, as for `grouped_allreduce_`. Do not use them before `synchronize(handle)`.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns a tuple of the tensors themselves. It raises the errors of
        `grouped_allreduce_`.
    """
    memories = [in_place(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    handle = ops.grouped_allreduce_.start([array for array, _ in memories], *how)
    return remember(handle, lambda _: tuple(deliver(None) for _, deliver in memories))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> int:
    """Start `grouped_allreduce`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensors: The tensors, of the same shapes and dtypes on every rank.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns a tuple of new tensors. It raises the errors of
        `grouped_allreduce`.
    """
    copies = [fresh(tensor) for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> list[torch.Tensor]:
    """Do `allreduce` for several tensors as one operation: all of them are reduced or none. Differentiable.

    Waits for all ranks of the process set. Short tensors travel together.

    Args:
        tensors: The tensors, of the same shapes and dtypes on every rank.
        average: Deprecated; use op.
        name: Ranks match calls by name, as for `allreduce`.
        compression: The dtype in which the tensors travel, as for `allreduce`.
        op: The operation, as for `allreduce`.
        prescale_factor: Multiplies the tensors before the reduction.
        postscale_factor: Multiplies the results.
        process_set: The ranks that take part.

    Returns:
        The reductions, as new tensors, in the same order.

    Raises:
        MismatchError: The ranks' arguments differ, or their numbers of tensors; on every rank.
        ValueError: `tensors` is empty, or another argument cannot be right.
    """
    small = [compressor(compression).compress(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)

    def make(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grouped_allreduce_([fresh(tensor) for tensor in given], None, name, *how)

    def back(*grads: torch.Tensor) -> list[torch.Tensor]:
        return grouped_allreduce(grads, None, None, Compression.none, *how)

    results = differentiable(make, back, [tensor for tensor, _ in small])
    return [compression.decompress(t, context) for t, (_, context) in zip(results, small, strict=True)]


# reduce


def reduce(
    tensor: torch.Tensor,
    root_rank: int,
    op: Op | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor | None:
    """Reduce all ranks' tensors to one rank. Not differentiable.

    Args:
        tensor: The tensor, of the same shape and dtype on every rank.
        root_rank: The global rank that gets the result.
        op: hvd.Average, Sum, Min, Max or Product.
        name: Ranks match calls by name, as for `allreduce`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        The reduction, as a new tensor, on root_rank; None on other ranks.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        ValueError: An argument cannot be right, or root_rank is not a member of the process set.
        NotImplementedError: `op` is Adasum.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    array = ops.reduce(readable(tensor), root_rank, *how)
    return None if array is None else laid_out(to_tensor(array), tensor)


def reduce_async(
    tensor: torch.Tensor,
    root_rank: int,
    op: Op | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> int:
    """Start `reduce`. Asynchronous: waits for no rank.

    Args:
        tensor: The tensor, as for `reduce`. It must not change before `synchronize(handle)`.
        root_rank: The global rank that gets the result.
        op: hvd.Average, Sum, Min, Max or Product.
        name: Ranks match calls by name, as for `allreduce`.
        prescale_factor: Multiplies the tensor before the reduction.
        postscale_factor: Multiplies the result.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the result of `reduce`. It raises the errors of `reduce`.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    handle = ops.reduce.start(readable(tensor), root_rank, *how)
    return remember(handle, lambda array: None if array is None else laid_out(to_tensor(array), tensor))
