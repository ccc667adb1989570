"""Collectives on torch tensors, with Horovod's names, handles (plain ints) and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdlite import ops, runtime
from hvdlite.ops import Average, Op
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.requests import Handle
from hvdlite.torch._tensors import to_array, to_tensor
from hvdlite.torch.compression import Compression

Everyone = global_process_set


@dataclass
class Awaited:
    """A handle and how its result becomes the user's tensor."""

    handle: Handle
    deliver: Callable[[Any], Any]


_awaited: dict[int, Awaited] = {}


def remember(handle: Handle, deliver: Callable[[Any], Any]) -> int:
    number = runtime.current().serial("torch handle")
    _awaited[number] = Awaited(handle, deliver)
    return number


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. Raises ValueError for a handle that is not pending."""
    if handle not in _awaited:
        raise ValueError(f"{handle} is not a pending handle: unknown, or already synchronized")
    return _awaited[handle].handle.poll()


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation; its output. None for a handle already synchronized, as in Horovod."""
    awaited = _awaited.pop(handle, None)
    return None if awaited is None else awaited.deliver(awaited.handle.wait())


def given(tensor: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    return lambda _: tensor


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy to reduce in place."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


# all-reduce

def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """All-reduce in place, asynchronously; returns a handle. tensor: contiguous, same shape on every rank."""
    handle = ops.allreduce_(
        to_array(tensor), ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set, wait=False
    )
    return remember(handle, given(tensor))


def allreduce_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """All-reduce in place; returns the tensor."""
    ops.allreduce_(
        to_array(tensor), ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set
    )
    return tensor


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """All-reduce into a new tensor, asynchronously; returns a handle."""
    return allreduce_async_(fresh(tensor), average, name, op, prescale_factor, postscale_factor, process_set)


class AllreduceFunction(torch.autograd.Function):
    """The gradient of an all-reduce is the same all-reduce of the gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, *how: Any) -> torch.Tensor:
        ctx.how = how
        return allreduce_(fresh(tensor), None, name, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return AllreduceFunction.apply(grads[0], None, *ctx.how), *(None,) * 5  # type: ignore[no-untyped-call]


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, compression: Any = Compression.none,
    op: Op | int | None = None, prescale_factor: float = 1.0, postscale_factor: float = 1.0,
    process_set: ProcessSet = Everyone,
) -> torch.Tensor:
    """The reduction of all ranks' tensors, as a new tensor; differentiable. Average by default."""
    small, context = compression.compress(tensor)
    result = AllreduceFunction.apply(  # type: ignore[no-untyped-call]
        small, name, ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set
    )
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> int:
    """All-reduce several tensors in place as one operation; returns a handle for the tuple of them."""
    handle = ops.grouped_allreduce_(
        [to_array(tensor) for tensor in tensors], ops.resolve_op(op, average), name, prescale_factor, postscale_factor,
        process_set, wait=False,
    )
    return remember(handle, lambda _: tuple(tensors))


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
    """As grouped_allreduce_async_, and wait; returns the tuple of tensors."""
    result: tuple[torch.Tensor, ...] = synchronize(grouped_allreduce_async_(tensors, *args, **kwargs))
    return result


def grouped_allreduce_async(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> int:
    """As grouped_allreduce_async_, into new tensors."""
    return grouped_allreduce_async_([fresh(tensor) for tensor in tensors], *args, **kwargs)


class GroupedAllreduceFunction(torch.autograd.Function):
    """The gradients of a grouped all-reduce are the same grouped all-reduce of the gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, how: tuple[Any, ...], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        return grouped_allreduce_([fresh(tensor) for tensor in tensors], None, name, *how)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *GroupedAllreduceFunction.apply(None, ctx.how, *grads)  # type: ignore[no-untyped-call]


def grouped_allreduce(
    tensors: Sequence[torch.Tensor], average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: Op | int | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet = Everyone,
) -> list[torch.Tensor]:
    """The reductions of several tensors, as new tensors, as one operation; differentiable."""
    small = [compression.compress(tensor) for tensor in tensors]
    how = (ops.resolve_op(op, average), prescale_factor, postscale_factor, process_set)
    results = GroupedAllreduceFunction.apply(name, how, *(tensor for tensor, _ in small))  # type: ignore[no-untyped-call]
    return [compression.decompress(t, context) for t, (_, context) in zip(results, small, strict=True)]


# broadcast

def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Overwrite tensor with root_rank's, in place, asynchronously; returns a handle."""
    return remember(ops.broadcast_(to_array(tensor), root_rank, name, process_set, wait=False), given(tensor))


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """Overwrite tensor with root_rank's, in place; returns the tensor."""
    ops.broadcast_(to_array(tensor), root_rank, name, process_set)
    return tensor


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """root_rank's tensor as a new tensor, asynchronously; returns a handle."""
    return broadcast_async_(fresh(tensor), root_rank, name, process_set)


class BroadcastFunction(torch.autograd.Function):
    """The root receives the average of all ranks' gradients, the others zeros."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: Any) -> torch.Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return broadcast_(fresh(tensor), root_rank, name, process_set)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        return grad * float(runtime.rank() == ctx.root_rank), None, None, None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """root_rank's tensor on every rank, as a new tensor; differentiable."""
    return BroadcastFunction.apply(tensor, root_rank, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


# all-gather

def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """All ranks' tensors concatenated along dimension 0, asynchronously; returns a handle."""
    return remember(ops.allgather(to_array(tensor.detach().contiguous()), name, process_set, wait=False), to_tensor)


class AllgatherFunction(torch.autograd.Function):
    """A rank's gradient is the average of all ranks' gradients, at the rows it contributed."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None, process_set: Any) -> torch.Tensor:
        ctx.rows, ctx.process_set = tensor.shape[0], process_set
        return synchronize(allgather_async(tensor, name, process_set))  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        averaged = allreduce(grads[0].contiguous(), op=Average, process_set=ctx.process_set)
        counts = synchronize(allgather_async(torch.tensor([ctx.rows]), process_set=ctx.process_set))
        start = int(counts[: runtime.rank()].sum())
        return averaged[start : start + ctx.rows], None, None


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = Everyone) -> torch.Tensor:
    """All ranks' tensors concatenated along dimension 0 (which may differ), on every rank; differentiable."""
    if tensor.dim() == 0:
        raise ValueError("allgather needs a tensor of at least one dimension; reshape the scalar to (1,)")
    return AllgatherFunction.apply(tensor, name, process_set)  # type: ignore[no-any-return, no-untyped-call]


def barrier(process_set: ProcessSet = Everyone) -> None:
    """Wait until every rank has called this."""
    ops.barrier(process_set)
