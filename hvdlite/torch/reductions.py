"""All-reduce and reduce of torch tensors. `allreduce` and `grouped_allreduce` are differentiable, as Horovod's:
gradients are those of the sum of the ranks' losses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import ops
from hvdlite.gradients.compression import compressor
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average, Op, op_of
from hvdlite.ops.handles import remember
from hvdlite.torch.compression import Compression
from hvdlite.torch.differentiable import differentiable
from hvdlite.torch.tensors import fresh, in_place, laid_out, readable, to_tensor

Everyone = global_process_set


# all-reduce

def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """`allreduce` in place, without gradient; the result is the tensor, of any layout. Waits for all ranks."""
    array, deliver = in_place(tensor)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return deliver(ops.allreduce_(array, *how))


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """`allreduce_` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    array, deliver = in_place(tensor)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.allreduce_.start(array, *how), deliver)


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """`allreduce`, asynchronously and without gradient; returns a handle for `synchronize`. Waits for nobody."""
    return allreduce_async_(fresh(tensor), average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Op | int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """The reduction of all ranks' tensors, as a new tensor; differentiable. Waits for all ranks of the process set.

    tensor: of the same shape and dtype on every rank. op: hvd.Average (the default), Sum, Min, Max, Product or Adasum;
    average: deprecated. compression: the dtype in which it travels. result = op over ranks of (tensor *
    prescale_factor), * postscale_factor. It has the tensor's layout (channels_last, say). An average of integers is
    exact, truncated toward zero; of float16 it does not overflow. A Sum overflows as NumPy's: integers wrap around.
    float16 and bfloat16 are added in float32. Of booleans Sum and Max are the logical or, Min and Product the and; they
    have no Average. name: calls are matched by it, in whatever order ranks make them; unnamed ones by their order.
    Raises MismatchError on every rank where the ranks' arguments differ; the job can go on.
    """
    small, context = compressor(compression).compress(tensor)
    how = (ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    if isinstance(small, torch.Tensor) and small.requires_grad and torch.is_grad_enabled():

        def back(grad: torch.Tensor) -> list[torch.Tensor]:
            return [allreduce(grad, None, None, Compression.none, *how)]

        (result,) = differentiable(lambda given: (allreduce_(fresh(given), None, name, *how),), back, [small])
    else:  # metrics, mostly: autograd would take 10 us to find out that it has nothing to do
        result = allreduce_(fresh(small), None, name, *how)
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> tuple[torch.Tensor, ...]:
    """All-reduce several tensors in place as one operation; the result is the tuple of them. Raises ValueError for
    tensors that share memory."""
    memories = [in_place(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    ops.grouped_allreduce_([array for array, _ in memories], *how)
    return tuple(deliver(None) for _, deliver in memories)


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """`grouped_allreduce_` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    memories = [in_place(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    handle = ops.grouped_allreduce_.start([array for array, _ in memories], *how)
    return remember(handle, lambda _: tuple(deliver(None) for _, deliver in memories))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """All-reduce several tensors into new ones as one operation, asynchronously; returns a handle."""
    copies = [fresh(tensor) for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: Op | int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> list[torch.Tensor]:
    """The reductions of several tensors, as new tensors, as one operation: all or none of them, short ones together.
    Differentiable. Arguments as for `allreduce`; every rank gives as many tensors. Waits for all ranks."""
    small = [compressor(compression).compress(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)

    def make(*given: torch.Tensor) -> Any:
        return grouped_allreduce_([fresh(tensor) for tensor in given], None, name, *how)

    def back(*grads: torch.Tensor) -> list[torch.Tensor]:
        return grouped_allreduce(grads, None, None, Compression.none, *how)

    results = differentiable(make, back, [tensor for tensor, _ in small])
    return [compression.decompress(t, context) for t, (_, context) in zip(results, small, strict=True)]


# reduce

def reduce(
    tensor: torch.Tensor, root_rank: int, op: Op | int = Average, name: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> torch.Tensor | None:
    """The reduction of all ranks' tensors at root_rank (a global rank), as a new tensor; None elsewhere. Arguments as
    for `allreduce`. Raises NotImplementedError for Adasum."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    array = ops.reduce(readable(tensor), root_rank, *how)
    return None if array is None else laid_out(to_tensor(array), tensor)


def reduce_async(
    tensor: torch.Tensor, root_rank: int, op: Op | int = Average, name: str | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """`reduce` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    handle = ops.reduce.start(readable(tensor), root_rank, *how)
    return remember(handle, lambda array: None if array is None else laid_out(to_tensor(array), tensor))


