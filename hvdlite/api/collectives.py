"""The neutral collectives: the framework is found from the tensor, and its own function of the same name is called.

The arguments after the tensor are passed on as they are: `name=`, `op=` and `process_set=` are the same everywhere, and
the rest is described at `hvdlite.torch`, `hvdlite.tensorflow`, `hvdlite.keras` and `hvdlite.numpy`. A function without
a tensor (`recv`) gives a NumPy array.

Three endings tell the form of a function. Without one it waits and returns a new tensor. A name that ends in `_`
changes its argument in place. A name with `_async` returns a number at once, and `synchronize` gives the result.
"""

# mypy: disable-error-code=no-any-return
# Which framework's function is called is known only when it is.

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdlite.api.frameworks import function_of
from hvdlite.ops.handles import poll, synchronize

T = TypeVar("T")


def allreduce(tensor: T, *args: object, **kwargs: object) -> T:
    """Reduce all ranks' tensors, and wait for all ranks.

    An average of integers is truncated toward zero. Of booleans op=Sum is the logical or.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The reduction, as a new tensor of the same kind.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "allreduce")(tensor, *args, **kwargs)


def allreduce_(tensor: T, *args: object, **kwargs: object) -> T:
    """`allreduce` in place.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The tensor itself, which holds the reduction.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "allreduce_")(tensor, *args, **kwargs)


def allreduce_async(tensor: object, *args: object, **kwargs: object) -> int:
    """`allreduce` without waiting.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "allreduce_async")(tensor, *args, **kwargs)


def allreduce_async_(tensor: object, *args: object, **kwargs: object) -> int:
    """`allreduce_` without waiting. Leave the tensor alone until `synchronize` returns.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "allreduce_async_")(tensor, *args, **kwargs)


def grouped_allreduce(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """Several all-reduces as one operation.

    Args:
        tensors: As many on every rank, each of the same shape and dtype there.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The reductions, as new tensors.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allreduce")(tensors, *args, **kwargs)


def grouped_allreduce_(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """`grouped_allreduce` in place.

    Args:
        tensors: As many on every rank, each of the same shape and dtype there.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The tensors themselves, which hold the reductions.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allreduce_")(tensors, *args, **kwargs)


def grouped_allreduce_async(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """`grouped_allreduce` without waiting.

    Args:
        tensors: As many on every rank, each of the same shape and dtype there.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allreduce_async")(tensors, *args, **kwargs)


def grouped_allreduce_async_(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """`grouped_allreduce_` without waiting. Leave the tensors alone until `synchronize` returns.

    Args:
        tensors: As many on every rank, each of the same shape and dtype there.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allreduce_async_")(tensors, *args, **kwargs)


def reduce(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T | None:
    """Reduce all ranks' tensors to one rank. Waits for all ranks.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        The reduction at root_rank, None elsewhere.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "reduce")(tensor, root_rank, *args, **kwargs)


def reduce_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """`reduce` without waiting.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "reduce_async")(tensor, root_rank, *args, **kwargs)


def reducescatter(tensor: T, *args: object, **kwargs: object) -> T:
    """Reduce all ranks' tensors and deal out the rows. Waits for all ranks.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        This rank's rows of the reduction. The first ranks get one more where they do not divide evenly.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "reducescatter")(tensor, *args, **kwargs)


def reducescatter_async(tensor: object, *args: object, **kwargs: object) -> int:
    """`reducescatter` without waiting.

    Args:
        tensor: Of the same shape and dtype on every rank.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "reducescatter_async")(tensor, *args, **kwargs)


def grouped_reducescatter(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """Several reduce-scatters as one operation.

    Args:
        tensors: As many on every rank, each of the same shape and dtype there.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        This rank's rows of each reduction.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_reducescatter")(tensors, *args, **kwargs)


def grouped_reducescatter_async(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """`grouped_reducescatter` without waiting.

    Args:
        tensors: As many on every rank, each of the same shape and dtype there.
        *args, **kwargs: As for the function of the tensor's framework: `op=` (Average by default), `name=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_reducescatter_async")(tensors, *args, **kwargs)


def allgather(tensor: T, *args: object, **kwargs: object) -> T:
    """Concatenate all ranks' tensors along the first dimension. Waits for all ranks.

    Args:
        tensor: Its first dimension may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A new tensor with the rows of all ranks, in rank order.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "allgather")(tensor, *args, **kwargs)


def allgather_async(tensor: object, *args: object, **kwargs: object) -> int:
    """`allgather` without waiting.

    Args:
        tensor: Its first dimension may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "allgather_async")(tensor, *args, **kwargs)


def grouped_allgather(tensors: Sequence[T], *args: object, **kwargs: object) -> Sequence[T]:
    """Several all-gathers as one operation.

    Args:
        tensors: As many on every rank. Their first dimensions may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A new tensor for each given one.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allgather")(tensors, *args, **kwargs)


def grouped_allgather_async(tensors: Sequence[object], *args: object, **kwargs: object) -> int:
    """`grouped_allgather` without waiting.

    Args:
        tensors: As many on every rank. Their first dimensions may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensors, "grouped_allgather_async")(tensors, *args, **kwargs)


def gather(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T | None:
    """Concatenate all ranks' tensors at one rank. Waits for all ranks.

    Args:
        tensor: Its first dimension may differ between ranks.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        All rows, in rank order, at root_rank; None elsewhere.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "gather")(tensor, root_rank, *args, **kwargs)


def gather_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """`gather` without waiting.

    Args:
        tensor: Its first dimension may differ between ranks.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "gather_async")(tensor, root_rank, *args, **kwargs)


def scatter(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T:
    """Deal out the rows of root_rank's tensor. Waits for all ranks.

    Args:
        tensor: The root's rows. Elsewhere it only tells the framework; None means NumPy.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `splits=`, `name=`, `process_set=`, ...

    Returns:
        This rank's rows.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(0 if tensor is None else tensor, "scatter")(tensor, root_rank, *args, **kwargs)


def scatter_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """`scatter` without waiting.

    Args:
        tensor: The root's rows. Elsewhere it only tells the framework; None means NumPy.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `splits=`, `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(0 if tensor is None else tensor, "scatter_async")(tensor, root_rank, *args, **kwargs)


def broadcast(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T:
    """Copy root_rank's tensor to every rank. Waits for all ranks.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        root_rank's tensor, as a new tensor of the same kind.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "broadcast")(tensor, root_rank, *args, **kwargs)


def broadcast_(tensor: T, root_rank: int, *args: object, **kwargs: object) -> T:
    """`broadcast` in place.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        The tensor itself, which holds root_rank's values.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "broadcast_")(tensor, root_rank, *args, **kwargs)


def broadcast_async(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """`broadcast` without waiting.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "broadcast_async")(tensor, root_rank, *args, **kwargs)


def broadcast_async_(tensor: object, root_rank: int, *args: object, **kwargs: object) -> int:
    """`broadcast_` without waiting. Leave the tensor alone until `synchronize` returns.

    Args:
        tensor: Of the same shape and dtype on every rank.
        root_rank: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "broadcast_async_")(tensor, root_rank, *args, **kwargs)


def alltoall(tensor: T, *args: object, **kwargs: object) -> T | tuple[T, T]:
    """Send rows to every rank, and receive rows from every rank. Waits for all ranks.

    Args:
        tensor: Its first dimension may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `splits=`, `name=`, `process_set=`, ...

    Returns:
        The rows that all ranks sent here, in rank order. With splits= also how many rows each rank sent.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "alltoall")(tensor, *args, **kwargs)


def alltoall_async(tensor: object, *args: object, **kwargs: object) -> int:
    """`alltoall` without waiting.

    Args:
        tensor: Its first dimension may differ between ranks.
        *args, **kwargs: As for the function of the tensor's framework: `splits=`, `name=`, `process_set=`, ...

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
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
        ValueError: The other rank is no member of the process set, or is this rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
    """
    return function_of(tensor, "send")(tensor, dest, *args, **kwargs)


def send_async(tensor: object, dest: int, *args: object, **kwargs: object) -> int:
    """`send` without waiting. Leave the tensor as it is until `synchronize` returns.

    Args:
        tensor: Of any shape and dtype.
        dest: A global rank.
        *args, **kwargs: As for the function of the tensor's framework: `name=`, `process_set=`.

    Returns:
        A number for `synchronize`.

    Raises:
        ValueError: The other rank is no member of the process set, or is this rank.
        TypeError: The framework of the tensor is unknown, or has no such function.
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
        ValueError: The other rank is no member of the process set, or is this rank.
    """
    return function_of(0, "recv")(source, *args, **kwargs)


def recv_async(source: int, *args: object, **kwargs: object) -> int:
    """`recv` without waiting.

    Args:
        source: A global rank.
        *args, **kwargs: `name` and `process_set`, as for `send`.

    Returns:
        A number for `synchronize`, which gives the result.

    Raises:
        ValueError: The other rank is no member of the process set, or is this rank.
    """
    return function_of(0, "recv_async")(source, *args, **kwargs)


__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "gather", "gather_async",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "poll", "recv", "recv_async", "reduce", "reduce_async", "reducescatter", "reducescatter_async", "scatter",
    "scatter_async", "send", "send_async", "synchronize",
]  # fmt: skip
