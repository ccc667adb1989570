"""Broadcast, all-gather and all-to-all of torch tensors.

The functions that wait and make new tensors are differentiable, as in Horovod. The gradients of broadcast and
all-gather are those of the average of the ranks' losses; the gradients of all-to-all are those of their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, overload

import numpy as np
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
Splits: TypeAlias = "torch.Tensor | Sequence[int] | np.ndarray[tuple[int, ...], np.dtype[np.integer]]"
"""Numbers of rows, one for each rank."""


# broadcast


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """Do `broadcast` in place. Not differentiable. Waits for all ranks of the process set.

    Args:
        tensor: The tensor, of the same shape and dtype on every rank. It is overwritten with root_rank's values.
        root_rank: The global rank whose values are taken.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The tensor itself.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        ValueError: root_rank is not a member of the process set, or elements of the tensor share memory (expand).
    """
    array, deliver = in_place(tensor)
    return deliver(ops.broadcast_(array, root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Start `broadcast_`. Asynchronous: waits for no rank.

    Args:
        tensor: The tensor, as for `broadcast_`. Do not use it before `synchronize(handle)`.
        root_rank: The global rank whose values are taken.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the tensor itself. It raises the errors of `broadcast_`.
    """
    array, deliver = in_place(tensor)
    return remember(ops.broadcast_.start(array, root_rank, name, process_set), deliver)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Start `broadcast`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensor: The tensor, of the same shape and dtype on every rank.
        root_rank: The global rank whose values are taken.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns root_rank's values as a new tensor. It raises the errors of
        `broadcast`.
    """
    return broadcast_async_(fresh(tensor), root_rank, name, process_set)


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor:
    """Give every rank root_rank's tensor. Differentiable. Waits for all ranks of the process set.

    Args:
        tensor: The tensor, of the same shape and dtype on every rank.
        root_rank: The global rank whose values are taken.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        root_rank's values, as a new tensor.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        ValueError: root_rank is not a member of the process set, or the tensor cannot be communicated.
    """

    def back(grad: torch.Tensor) -> list[torch.Tensor]:
        """Return the average of all ranks' gradients on the root, zeros on other ranks."""
        mean = allreduce(grad, op=Average, process_set=process_set)
        return [mean if runtime.rank() == root_rank else torch.zeros_like(mean)]

    return differentiable(lambda given: (broadcast_(fresh(given), root_rank, name, process_set),), back, [tensor])[0]


# all-gather


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = Everyone) -> int:
    """Start `allgather`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensor: The tensor, as for `allgather`. It must not change before `synchronize(handle)`.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the concatenation. It raises the errors of `allgather`.
    """
    return remember(ops.allgather.start(readable(tensor), name, process_set), to_tensor)


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Start `grouped_allgather`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensors: The tensors, as for `grouped_allgather`. They must not change before `synchronize(handle)`.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns a tuple of the concatenations. It raises the errors of
        `grouped_allgather`.
    """
    handle = ops.grouped_allgather.start([readable(tensor) for tensor in tensors], name, process_set)
    return remember(handle, lambda arrays: tuple(map(to_tensor, arrays)))


def grouped_allgather(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = Everyone
) -> tuple[torch.Tensor, ...]:
    """Do `allgather` for several tensors as one operation. Differentiable. Waits for all ranks of the process set.

    Args:
        tensors: The tensors, as many on every rank, each as for `allgather`.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The concatenations, as new tensors, in the same order.

    Raises:
        MismatchError: The ranks' arguments differ, or their numbers of tensors; on every rank.
        ValueError: `tensors` is empty, or a tensor cannot be communicated.
    """
    return gathered(tensors, lambda arrays: ops.grouped_allgather(arrays, name, process_set), process_set)


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = Everyone) -> torch.Tensor:
    """Concatenate all ranks' tensors on every rank, in rank order along dimension 0. Differentiable.

    Waits for all ranks of the process set.

    Args:
        tensor: The tensor, of one dimension at least, of the same dtype on every rank. Only dimension 0 may differ; it
            may be 0.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The concatenation, as a new tensor.

    Raises:
        MismatchError: Dtypes or other dimensions differ between ranks; on every rank.
        ValueError: The tensor cannot be communicated.
    """
    return gathered([tensor], lambda arrays: [ops.allgather(arrays[0], name, process_set)], process_set)[0]


def gathered(
    tensors: Sequence[torch.Tensor], work: Callable[[list[Array]], Sequence[Array]], process_set: ProcessSet
) -> tuple[torch.Tensor, ...]:
    """All-gather tensors by calling `work` with their arrays.

    The gradient of a tensor is the average of all ranks' gradients, at the rows that this rank has contributed.
    """
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


def tensor_of_splits(kind: str, splits: Splits) -> torch.Tensor:
    """Return splits as a tensor. Raises TypeError if this is not possible. kind: the operation, for the message."""
    try:
        return splits if isinstance(splits, torch.Tensor) else torch.as_tensor(splits, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{kind}: splits must be a tensor or a list of whole numbers, not {splits!r}") from None


def checked_splits(splits: Splits | None) -> torch.Tensor | None:
    """Return the splits of an all-to-all as a tensor. Raises ValueError unless their dtype is int32 or int64."""
    found = None if splits is None else tensor_of_splits("alltoall", splits)
    if found is not None and found.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"alltoall: splits must be int32 or int64, not {found.dtype}")
    return found


def alltoall_with_counts(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows that all ranks have sent here, and how many rows each rank sent (int32, where the splits lie)."""
    wanted = checked_splits(splits)
    counts = None if wanted is None else wanted.cpu().numpy()
    device = torch.device("cpu") if wanted is None else wanted.device
    result = ops.alltoall(readable(tensor), counts, name, process_set)
    return (to_tensor(result[0]), to_tensor(result[1]).to(device))


def alltoall_async(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> int:
    """Start `alltoall`. Asynchronous: waits for no rank. Not differentiable.

    Args:
        tensor: The tensor, as for `alltoall`. It must not change before `synchronize(handle)`.
        splits: How many rows go to each rank, as for `alltoall`.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        A handle: `synchronize(handle)` waits, and returns the received rows and, with or without `splits`, how many
        rows each rank sent. It raises the errors of `alltoall`.
    """
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
    tensor: torch.Tensor, splits: Splits, name: str | None = None, process_set: ProcessSet = Everyone
) -> tuple[torch.Tensor, torch.Tensor]: ...
def alltoall(
    tensor: torch.Tensor, splits: Splits | None = None, name: str | None = None, process_set: ProcessSet = Everyone
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send the first splits[0] rows to rank 0 of the process set, the next splits[1] to rank 1, ... Differentiable.

    Waits for all ranks of the process set.

    Args:
        tensor: The tensor, of one dimension at least. All dimensions but the first, and the dtype, are the same on
            every rank.
        splits: How many rows go to each rank: int32 or int64, or a list of whole numbers. Their sum is at most the
            number of rows. None: each rank gets as many rows as the others.
        name: Ranks match calls by name, as for `allreduce`.
        process_set: The ranks that take part.

    Returns:
        The rows that all ranks have sent here, in rank order. With `splits`, a tuple of these and of how many rows each
        rank sent (int32).

    Raises:
        MismatchError: Dtypes or other dimensions differ between ranks; on every rank.
        ValueError: The splits do not fit the tensor, or the number of rows does not divide evenly.
        TypeError: `splits` is neither a tensor nor a list of whole numbers.
    """
    rows: list[int] = []  # of the tensor
    counts: list[torch.Tensor] = []  # the rows that each rank has sent here

    def make(given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        output, received = alltoall_with_counts(given, splits, name, process_set)
        rows[:], counts[:] = [given.shape[0]], [received]
        return output, received

    def back(grad: torch.Tensor, _: object) -> list[torch.Tensor]:
        grad, _ = alltoall(grad, counts[0], None, process_set)
        unsent = grad.new_zeros(rows[0] - grad.shape[0], *grad.shape[1:])
        return [torch.cat([grad, unsent])]

    output, received = differentiable(make, back, [tensor])
    return output if splits is None else (output, received)


def barrier(process_set: ProcessSet = Everyone) -> None:
    """Wait until every rank of the process set has called this.

    Args:
        process_set: The ranks that wait for each other.
    """
    ops.barrier(process_set)
