"""Broadcast, all-gather and all-to-all of torch tensors. The plain functions that make new tensors are differentiable,
as Horovod's: gradients of broadcast and all-gather are those of the average of the ranks' losses, and of all-to-all
those of their sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import Average
from hvdlite.ops.handles import remember
from hvdlite.torch.differentiable import differentiable
from hvdlite.torch.reductions import allreduce, grouped_allreduce
from hvdlite.torch.tensors import fresh, in_place, readable, to_array, to_tensor

Everyone = global_process_set


# broadcast

def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """`broadcast` in place, without gradient: overwrites the tensor; the result is the tensor. Waits for all ranks."""
    array, deliver = in_place(tensor)
    return deliver(ops.broadcast_(array, root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """`broadcast_` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    array, deliver = in_place(tensor)
    return remember(ops.broadcast_.start(array, root_rank, name, process_set), deliver)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """root_rank's tensor as a new tensor, asynchronously; returns a handle."""
    return broadcast_async_(fresh(tensor), root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """root_rank's tensor on every rank, as a new tensor; differentiable. Waits for all ranks.

    root_rank: a global rank. tensor: of the same shape and dtype on every rank. name: as for `allreduce`. Raises
    MismatchError on every rank where the ranks' arguments differ, ValueError for a root that is no member.
    """

    def back(grad: torch.Tensor) -> list[torch.Tensor]:
        """The average of all ranks' gradients, for the root; the others' are zeros."""
        mean = allreduce(grad, op=Average, process_set=process_set)
        return [mean if runtime.rank() == root_rank else torch.zeros_like(mean)]

    return differentiable(lambda given: (broadcast_(fresh(given), root_rank, name, process_set),), back, [tensor])[0]


# all-gather

def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """All ranks' tensors concatenated along dimension 0, asynchronously; returns a handle."""
    return remember(ops.allgather.start(readable(tensor), name, process_set), to_tensor)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Several all-gathers as one operation, asynchronously; returns a handle for a tuple."""
    handle = ops.grouped_allgather.start([readable(tensor) for tensor in tensors], name, process_set)
    return remember(handle, lambda arrays: tuple(map(to_tensor, arrays)))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everyone
) -> tuple[torch.Tensor, ...]:
    """`allgather` of several tensors, as many on every rank, as one operation; differentiable. Waits for all ranks."""
    return gathered(tensors, lambda arrays: ops.grouped_allgather(arrays, name, process_set), process_set)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = Everyone) -> torch.Tensor:
    """All ranks' tensors concatenated along dimension 0 in rank order, on every rank; differentiable. Waits for all.

    tensor: of the same dtype and the same further dimensions on every rank; the first may differ, or be 0. name: as for
    `allreduce`. Raises MismatchError on every rank where the ranks' arguments differ.
    """
    return gathered([tensor], lambda arrays: [ops.allgather(arrays[0], name, process_set)], process_set)[0]


def gathered(
    tensors: Sequence[torch.Tensor], work: Callable[[list[Array]], Sequence[Array]], process_set: ProcessSet
) -> tuple[torch.Tensor, ...]:
    """All-gathers; a rank's gradient is the average of all ranks' gradients, at the rows it contributed."""
    rows: list[int] = []

    def make(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = work([readable(tensor) for tensor in given])
        rows[:] = [tensor.shape[0] for tensor in given]
        return tuple(map(to_tensor, arrays))

    def back(*grads: torch.Tensor) -> list[torch.Tensor]:
        counts = to_tensor(ops.allgather(to_array(torch.tensor([rows])), process_set=process_set))
        starts = counts[: runtime.group_of(process_set).rank].sum(dim=0).tolist()
        means = grouped_allreduce(grads, op=Average, process_set=process_set)
        return [mean[start : start + own] for mean, start, own in zip(means, starts, rows, strict=True)]

    return differentiable(make, back, tensors)


# all-to-all

def tensor_of_splits(kind: str, splits: Any) -> torch.Tensor:
    """Splits as a tensor. Raises TypeError for what cannot be one."""
    try:
        return splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{kind}: splits must be a tensor or a list of whole numbers, not {splits!r}") from None


def checked_splits(splits: Any) -> torch.Tensor | None:
    """The same, or None. Raises ValueError for another dtype than int32 and int64."""
    found = None if splits is None else tensor_of_splits("alltoall", splits)
    if found is not None and found.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"alltoall: splits must be int32 or int64, not {found.dtype}")
    return found


def alltoall_with_counts(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows sent here by all ranks, and how many each sent (int32, where the splits lie)."""
    wanted = checked_splits(splits)
    counts = None if wanted is None else wanted.cpu().numpy()
    device = torch.device("cpu") if wanted is None else wanted.device
    result = ops.alltoall(readable(tensor), counts, name, process_set)
    return (to_tensor(result[0]), to_tensor(result[1]).to(device))


def alltoall_async(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """`alltoall` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    wanted = checked_splits(splits)
    counts = None if wanted is None else wanted.cpu().numpy()
    device = torch.device("cpu") if wanted is None else wanted.device
    handle = ops.alltoall.start(readable(tensor), counts, name, process_set)
    return remember(handle, lambda result: (to_tensor(result[0]), to_tensor(result[1]).to(device)))


@overload
def alltoall(
    tensor: torch.Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor: ...
@overload
def alltoall(
    tensor: torch.Tensor, splits: Any, name: str | None = None, process_set: ProcessSet = Everyone
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> Any:
    """Send the first splits[0] rows to rank 0 of the set, the next splits[1] to rank 1, ...; differentiable.

    splits: a tensor of int32 or int64, or a list of whole numbers; without, all get equally many rows. Returns what all
    ranks sent here, in rank order; with splits also how many rows each sent (int32). Raises ValueError for splits that
    do not fit, TypeError for what are none.
    """
    rows: list[int] = []  # of the tensor
    counts: list[torch.Tensor] = []  # of the rows that each rank has sent here

    def make(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = alltoall_with_counts(given, splits, name, process_set)
        rows[:], counts[:] = [given.shape[0]], [received]
        return output, received

    def back(grad: torch.Tensor, _: Any) -> list[torch.Tensor]:
        grad, _ = alltoall(grad, counts[0], None, process_set)
        unsent = grad.new_zeros(rows[0] - grad.shape[0], *grad.shape[1:])
        return [torch.cat([grad, unsent])]

    output, received = differentiable(make, back, [tensor])
    return output if splits is None else (output, received)


def barrier(process_set: ProcessSet = Everyone) -> None:
    """Wait until every rank of the set has called this."""
    ops.barrier(process_set)
