"""Handles of asynchronous operations: plain numbers, as in Horovod, whatever framework the operation was called in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from typing import Any, Generic, TypeVar

from hvdlite.lanes.request import Handle

T = TypeVar("T")


def as_it_is(result: T) -> T:
    return result


@dataclass(frozen=True)
class Awaited(Generic[T]):
    """A request's handle and how its result becomes the user's tensor."""

    handle: Handle[T]
    deliver: Callable[[T], object]


_awaited: dict[int, Awaited[Any]] = {}
_numbers = count(1)


def remember(handle: Handle[T], deliver: Callable[[T], object] = as_it_is) -> int:
    """A number for the handle. deliver: called once, by `synchronize`, with the request's result."""
    number = next(_numbers)
    _awaited[number] = Awaited(handle, deliver)
    return number


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. Raises ValueError for a handle that is not pending, TypeError
    for what is none."""
    require_handle(handle)
    if handle not in _awaited:
        raise ValueError(f"{handle} is not a pending handle: unknown, or already synchronized")
    return _awaited[handle].handle.done


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation; its output. None for a handle already synchronized, as in Horovod. What waits
    itself, as `sparse_allreduce_async` returns it, is called. Raises TypeError for what is no handle."""
    if callable(handle):
        return handle()
    require_handle(handle)
    awaited = _awaited.get(handle)
    if awaited is None:
        return None
    try:
        result = awaited.handle.wait()
    finally:
        if awaited.handle.done:  # else a signal's handler has raised: it can be awaited again
            _awaited.pop(handle, None)
    return awaited.deliver(result)


def require_handle(handle: object) -> None:
    if not isinstance(handle, Integral):
        raise TypeError(f"a handle is what an asynchronous function (_async) returned, not {type(handle).__name__}")
