"""The neutral collectives: the framework is found from the tensor, and its own function of the same name is called.

The arguments after the tensor are that function's: name=, op=, process_set= and so on are the same everywhere. What
is asked for without a tensor (`recv`) is a NumPy array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from hvdlite.api import frameworks
from hvdlite.ops.handles import poll, synchronize

T = TypeVar("T")


def function_of(tensor: Any, name: str) -> Callable[..., Any]:
    """The tensor's framework's function of this name. Raises TypeError where it has none."""
    adapter = frameworks.adapter(tensor)
    try:
        return getattr(adapter, name)  # type: ignore[no-any-return]
    except AttributeError:
        raise TypeError(f"{adapter.__name__} has no {name}()") from None


def allreduce(tensor: T, *args: Any, **kwargs: Any) -> T:
    """The reduction (Average by default; op=, name=) of all ranks' tensors, as a new tensor of the same kind. Waits for
    all ranks, of which each gives the same shape and dtype. An average of integers is truncated toward zero. Of
    booleans op=Sum is the logical or. Raises MismatchError on every rank where they differ."""
    return function_of(tensor, "allreduce")(tensor, *args, **kwargs)  # type: ignore[no-any-return]


def grouped_allreduce(tensors: Sequence[T], *args: Any, **kwargs: Any) -> list[T]:
    """Several all-reduces as one operation."""
    return function_of(tensors, "grouped_allreduce")(tensors, *args, **kwargs)  # type: ignore[no-any-return]


def reduce(tensor: T, root_rank: int, *args: Any, **kwargs: Any) -> T | None:
    """The reduction of all ranks' tensors at root_rank; None elsewhere."""
    return function_of(tensor, "reduce")(tensor, root_rank, *args, **kwargs)  # type: ignore[no-any-return]


def reducescatter(tensor: T, *args: Any, **kwargs: Any) -> T:
    """This rank's rows of the reduction (Average by default) of all ranks' tensors."""
    return function_of(tensor, "reducescatter")(tensor, *args, **kwargs)  # type: ignore[no-any-return]


def grouped_reducescatter(tensors: Sequence[T], *args: Any, **kwargs: Any) -> list[T]:
    """Several reduce-scatters as one operation."""
    return function_of(tensors, "grouped_reducescatter")(tensors, *args, **kwargs)  # type: ignore[no-any-return]


def allgather(tensor: T, *args: Any, **kwargs: Any) -> T:
    """All ranks' tensors concatenated along the first dimension (which may differ), of the same kind."""
    return function_of(tensor, "allgather")(tensor, *args, **kwargs)  # type: ignore[no-any-return]


def grouped_allgather(tensors: Sequence[T], *args: Any, **kwargs: Any) -> Sequence[T]:
    """Several all-gathers as one operation."""
    return function_of(tensors, "grouped_allgather")(tensors, *args, **kwargs)  # type: ignore[no-any-return]


def gather(tensor: T, root_rank: int, *args: Any, **kwargs: Any) -> T | None:
    """All ranks' tensors concatenated along the first dimension at root_rank; None elsewhere."""
    return function_of(tensor, "gather")(tensor, root_rank, *args, **kwargs)  # type: ignore[no-any-return]


def scatter(tensor: T, root_rank: int, *args: Any, **kwargs: Any) -> T:
    """This rank's rows of root_rank's tensor. Elsewhere any tensor tells the framework; None: a NumPy array."""
    kind = 0 if tensor is None else tensor
    return function_of(kind, "scatter")(tensor, root_rank, *args, **kwargs)  # type: ignore[no-any-return]


def broadcast(tensor: T, root_rank: int, *args: Any, **kwargs: Any) -> T:
    """root_rank's tensor on every rank, as a new tensor of the same kind."""
    return function_of(tensor, "broadcast")(tensor, root_rank, *args, **kwargs)  # type: ignore[no-any-return]


def alltoall(tensor: T, *args: Any, **kwargs: Any) -> Any:
    """The rows that all ranks send here, in rank order; with splits= also how many each sent."""
    return function_of(tensor, "alltoall")(tensor, *args, **kwargs)


def send(tensor: Any, dest: int, *args: Any, **kwargs: Any) -> Any:
    """Send a tensor to a rank that calls recv; waits until it has."""
    return function_of(tensor, "send")(tensor, dest, *args, **kwargs)


def recv(source: int, *args: Any, **kwargs: Any) -> Any:
    """What a rank sends here, as a NumPy array. (`hvdlite.torch.recv` gives a tensor.)"""
    return function_of(0, "recv")(source, *args, **kwargs)


def recv_async(source: int, *args: Any, **kwargs: Any) -> int:
    """A number for `synchronize`, which returns what `recv` does."""
    return function_of(0, "recv_async")(source, *args, **kwargs)  # type: ignore[no-any-return]


def other_form(name: str) -> Callable[..., Any]:
    """The in-place (`_`) or asynchronous (`_async`: a number for `synchronize`) form of a function above."""

    def call(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        return function_of(tensor, name)(tensor, *args, **kwargs)

    def call_grouped(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return function_of(tensors, name)(tensors, *args, **kwargs)

    form = call_grouped if name.startswith("grouped_") else call
    form.__name__ = form.__qualname__ = name
    form.__doc__ = f"As {name.rstrip('_').removesuffix('_async')}(), in the form that the name's ending tells."
    return form


allreduce_, allreduce_async, allreduce_async_ = map(other_form, ("allreduce_", "allreduce_async", "allreduce_async_"))
broadcast_, broadcast_async, broadcast_async_ = map(other_form, ("broadcast_", "broadcast_async", "broadcast_async_"))
grouped_allreduce_, grouped_allreduce_async_ = map(other_form, ("grouped_allreduce_", "grouped_allreduce_async_"))
grouped_allreduce_async, grouped_allgather_async, grouped_reducescatter_async = map(
    other_form, ("grouped_allreduce_async", "grouped_allgather_async", "grouped_reducescatter_async")
)
allgather_async, alltoall_async, reducescatter_async = map(
    other_form, ("allgather_async", "alltoall_async", "reducescatter_async")
)
reduce_async, gather_async, scatter_async, send_async = map(
    other_form, ("reduce_async", "gather_async", "scatter_async", "send_async")
)

__all__ = [
    "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "alltoall",
    "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_", "gather", "gather_async",
    "grouped_allgather", "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_",
    "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "poll", "recv", "recv_async", "reduce", "reduce_async", "reducescatter", "reducescatter_async", "scatter",
    "scatter_async", "send", "send_async", "synchronize",
]  # fmt: skip
