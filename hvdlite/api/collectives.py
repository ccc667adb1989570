"""Collectives for every framework: each calls the function of the same name in the tensor's framework.

All arguments after the tensor are passed on. `name=`, `op=` and `process_set=` mean the same in every framework;
`hvdlite.torch`, `hvdlite.tensorflow`, `hvdlite.keras` and `hvdlite.numpy` describe the others. `recv`, which has no
tensor, returns a NumPy array.

A function waits and returns a new tensor, unless its name says otherwise. If the name contains `_async`, the function
returns a handle at once: a number for `synchronize`, which returns the result. If the name ends in `_`, the function
changes its tensor in place.
"""

# mypy: disable-error-code=no-any-return
# The framework's function, and so its type, is known only at the call.

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdlite.api.frameworks import function_of
from hvdlite.ops.handles import poll, synchronize

T = TypeVar("T")


def allreduce(tensor: T, *args: object, **kwargs: object) -> T:
    """Reduce all ranks' tensors. Collective; waits for all ranks of the process set.

    An average of integers is truncated toward zero. Of booleans op=Sum is the logical or.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The reduction, as a new tensor of the same kind.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "allreduce")(tensor, *args, **kwargs)


def allreduce_(tensor: T, *args: object, **kwargs: object) -> T:
    """`allreduce` in place.

    Args:
        tensor, ...: As for `allreduce`.

    Returns:
        The tensor itself, which holds the reduction.
    """
    return function_of(tensor, "allreduce_")(tensor, *args, **kwargs)


def allreduce_async(tensor: object, *args: object, **kwargs: object) -> int:
    """Asynchronous `allreduce`: returns at once.

    Args:
        tensor, ...: As for `allreduce`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "allreduce_async")(tensor, *args, **kwargs)


def allreduce_async_(tensor: object, *args: object, **kwargs: object) -> int:
    """Asynchronous `allreduce_`: returns at once. The tensor must not be used before `synchronize` returns.

    Args:
        tensor, ...: As for `allreduce_`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "allreduce_async_")(tensor, *args, **kwargs)


def grouped_allreduce(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """Reduce several tensors as one operation. Collective; waits for all ranks of the process set.

    Args:
        tensors: Equally many on every rank, each of the same shape and dtype.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The reductions, as new tensors.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allreduce")(tensors, *args, **kwargs)


def grouped_allreduce_(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """`grouped_allreduce` in place.

    Args:
        tensors, ...: As for `grouped_allreduce`.

    Returns:
        The tensors themselves, which hold the reductions.
    """
    return function_of(tensors, "grouped_allreduce_")(tensors, *args, **kwargs)


def grouped_allreduce_async(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """Asynchronous `grouped_allreduce`: returns at once.

    Args:
        tensors, ...: As for `grouped_allreduce`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensors, "grouped_allreduce_async")(tensors, *args, **kwargs)


def grouped_allreduce_async_(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """Asynchronous `grouped_allreduce_`: returns at once. The tensors must not be used before `synchronize` returns.

    Args:
        tensors, ...: As for `grouped_allreduce_`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensors, "grouped_allreduce_async_")(tensors, *args, **kwargs)


def reduce(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T | None:
    """Reduce all ranks' tensors to one rank. Collective; waits for all ranks of the process set.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The reduction on root_rank. None on other ranks.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "reduce")(tensor, root_rank, *args, **kwargs)


def reduce_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `reduce`: returns at once.

    Args:
        tensor, ...: As for `reduce`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "reduce_async")(tensor, root_rank, *args, **kwargs)


def reducescatter(tensor: T, *args: object, **kwargs: object) -> T:
    """Reduce all ranks' tensors, and divide the rows among the ranks. Collective; waits for all of them.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        This rank's rows of the reduction. If the rows cannot be divided evenly, the first ranks get one more.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "reducescatter")(tensor, *args, **kwargs)


def reducescatter_async(tensor: object, *args: object, **kwargs: object) -> int:
    """Asynchronous `reducescatter`: returns at once.

    Args:
        tensor, ...: As for `reducescatter`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "reducescatter_async")(tensor, *args, **kwargs)


def grouped_reducescatter(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """Reduce-scatter several tensors as one operation. Collective; waits for all ranks of the process set.

    Args:
        tensors: Equally many on every rank, each of the same shape and dtype.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        This rank's rows of each reduction.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_reducescatter")(tensors, *args, **kwargs)


def grouped_reducescatter_async(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """Asynchronous `grouped_reducescatter`: returns at once.

    Args:
        tensors, ...: As for `grouped_reducescatter`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensors, "grouped_reducescatter_async")(tensors, *args, **kwargs)


def allgather(tensor: T, *args: object, **kwargs: object) -> T:
    """Concatenate all ranks' tensors along the first dimension. Collective; waits for all ranks of the process set.

    Args:
        tensor: The first dimension may differ between ranks. Other dimensions and the dtype must agree.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A new tensor with the rows of all ranks, in rank order.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "allgather")(tensor, *args, **kwargs)


def allgather_async(tensor: object, *args: object, **kwargs: object) -> int:
    """Asynchronous `allgather`: returns at once.

    Args:
        tensor, ...: As for `allgather`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "allgather_async")(tensor, *args, **kwargs)


def grouped_allgather(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """All-gather several tensors as one operation. Collective; waits for all ranks of the process set.

    Args:
        tensors: Equally many on every rank. Their first dimensions may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A new tensor for each given one.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allgather")(tensors, *args, **kwargs)


def grouped_allgather_async(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """Asynchronous `grouped_allgather`: returns at once.

    Args:
        tensors, ...: As for `grouped_allgather`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensors, "grouped_allgather_async")(tensors, *args, **kwargs)


def gather(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T | None:
    """Concatenate all ranks' tensors on one rank. Collective; waits for all ranks of the process set.

    Args:
        tensor: The first dimension may differ between ranks. Other dimensions and the dtype must agree.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        All rows, in rank order, at root_rank; None elsewhere.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "gather")(tensor, root_rank, *args, **kwargs)


def gather_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `gather`: returns at once.

    Args:
        tensor, ...: As for `gather`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "gather_async")(tensor, root_rank, *args, **kwargs)


def scatter(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T:
    """Divide the rows of root_rank's tensor among the ranks. Collective; waits for all of them.

    Args:
        tensor: The root's rows. Elsewhere it only tells the framework; None means NumPy.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `splits=`, `name=`, `process_set=`, ...

    Returns:
        This rank's rows.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(0 if tensor is None else tensor, "scatter")(tensor, root_rank, *args, **kwargs)


def scatter_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `scatter`: returns at once.

    Args:
        tensor, ...: As for `scatter`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(0 if tensor is None else tensor, "scatter_async")(tensor, root_rank, *args, **kwargs)


def broadcast(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T:
    """Copy root_rank's tensor to every rank. Collective; waits for all ranks of the process set.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        root_rank's tensor, as a new tensor of the same kind.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "broadcast")(tensor, root_rank, *args, **kwargs)


def broadcast_(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T:
    """`broadcast` in place.

    Args:
        tensor, ...: As for `broadcast`.

    Returns:
        The tensor itself, which holds root_rank's values.
    """
    return function_of(tensor, "broadcast_")(tensor, root_rank, *args, **kwargs)


def broadcast_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `broadcast`: returns at once.

    Args:
        tensor, ...: As for `broadcast`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "broadcast_async")(tensor, root_rank, *args, **kwargs)


def broadcast_async_(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `broadcast_`: returns at once. The tensor must not be used before `synchronize` returns.

    Args:
        tensor, ...: As for `broadcast_`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "broadcast_async_")(tensor, root_rank, *args, **kwargs)


def alltoall(tensor: T, *args: object, **kwargs: object) -> T | tuple[T, T]:
    """Send rows to every rank, and receive rows from every rank. Collective; waits for all of them.

    Args:
        tensor: The first dimension may differ between ranks. Other dimensions and the dtype must agree.
        *args, **kwargs: As for the function of the tensor's framework: `splits=`, `name=`, `process_set=`, ...

    Returns:
        The rows that all ranks sent here, in rank order. With splits= also how many rows each rank sent.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "alltoall")(tensor, *args, **kwargs)


def alltoall_async(tensor: object, *args: object, **kwargs: object) -> int:
    """Asynchronous `alltoall`: returns at once.

    Args:
        tensor, ...: As for `alltoall`.

    Returns:
        A handle for `synchronize`, which returns the result.
    """
    return function_of(tensor, "alltoall_async")(tensor, *args, **kwargs)


def send(tensor: object, dest: int, *args: object, **kwargs: object) -> object:
    """Send a tensor to a rank that calls `recv`, and wait until it has received the tensor.

    Args:
        tensor: Of any shape and dtype.
        dest: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`.

    Returns:
        For PyTorch a scalar, through which the receiver's gradient comes back; else None.

    Raises:
        ValueError: The other rank is no member of the process set, or is this rank itself.
        TypeError: The tensor's framework is unknown, or has no such function.
    """
    return function_of(tensor, "send")(tensor, dest, *args, **kwargs)


def send_async(tensor: object, dest: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `send`: returns at once. The tensor must not change before `synchronize` returns.

    Args:
        tensor, ...: As for `send`.

    Returns:
        A handle for `synchronize`.
    """
    return function_of(tensor, "send_async")(tensor, dest, *args, **kwargs)


def recv(source: int, *args: object, **kwargs: object) -> NDArray[np.generic]:
    """Wait for an array that a rank sends here.

    Args:
        source: A global rank.
        *args, **kwargs: `name` and `process_set`, as for `send`.

    Returns:
        A new NumPy array. (`hvdlite.torch.recv` gives a tensor.)

    Raises:
        ValueError: The other rank is no member of the process set, or is this rank itself.
    """
    return function_of(0, "recv")(source, *args, **kwargs)


def recv_async(source: int, *args: object, **kwargs: object) -> int:
    """Asynchronous `recv`: returns at once.

    Args:
        source, ...: As for `recv`.

    Returns:
        A handle for `synchronize`, which returns the array.
    """
    return function_of(0, "recv_async")(source, *args, **kwargs)


def neighbor_allreduce(tensor: T, **kwargs: object) -> T:
    """Average a tensor with those of neighbours (Bluefog). Waits for these ranks alone.

    Args:
        tensor: Of a floating-point dtype; of the same shape and dtype on neighbours.
        **kwargs: As for the function of the tensor's framework: `self_weight=`, `src_weights=`, `dst_weights=`,
            `name=`.

    Returns:
        The weighted average, as a new tensor of the same kind.

    Raises:
        MismatchError: Neighbours' arguments differ; on both.
        ShutdownError: A neighbour has shut down.
        TypeError: The tensor's framework is unknown, or has no such function, or the dtype is not floating-point.
        ValueError: Some of the weights are missing, or are for impossible ranks.
    """
    return function_of(tensor, "neighbor_allreduce")(tensor, **kwargs)


def hierarchical_neighbor_allreduce(tensor: T, **kwargs: object) -> T:
    """Average a tensor within each host, then with the averages of neighbouring hosts. Waits for these hosts alone.

    Args:
        tensor: Of a floating-point dtype; of the same shape and dtype on all ranks.
        **kwargs: As for the function of the tensor's framework: `self_weight=`, `src_machine_weights=`,
            `dst_machine_weights=`, `name=`.

    Returns:
        The weighted average, as a new tensor of the same kind.

    Raises:
        MismatchError: Ranks' arguments differ.
        ShutdownError: A rank that this one waits for has shut down.
        TypeError: The tensor's framework is unknown, or has no such function, or the dtype is not floating-point.
        ValueError: Some of the weights are missing, or are for impossible hosts.
    """
    return function_of(tensor, "hierarchical_neighbor_allreduce")(tensor, **kwargs)


__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "gather", "gather_async",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "hierarchical_neighbor_allreduce", "neighbor_allreduce", "poll", "recv", "recv_async", "reduce", "reduce_async",
    "reducescatter", "reducescatter_async", "scatter", "scatter_async", "send", "send_async", "synchronize",
]  # fmt: skip
