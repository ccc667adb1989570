"""Handles of asynchronous operations: plain numbers, as in Horovod, the same for every framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from typing import Any, Generic, TypeVar

from hvdlite.lanes.request import Handle

T = TypeVar("T")


def as_it_is(result: T) -> T:
    """Return the result."""
    return result


@dataclass(frozen=True)
class Awaited(Generic[T]):
    """An operation that has been started.

    Attributes:
        handle: The promise of its result.
        deliver: Makes the user's tensor of the result.
    """

    handle: Handle[T]
    deliver: Callable[[T], object]


_awaited: dict[int, Awaited[Any]] = {}
_numbers = count(1)


def remember(handle: Handle[T], deliver: Callable[[T], object] = as_it_is) -> int:
    """Keep a handle for `synchronize`.

    Args:
        handle: The promise of a request's result.
        deliver: `synchronize` calls it once with that result, and returns what it returns.

    Returns:
        A number for `poll` and `synchronize`.
    """
    number = next(_numbers)
    _awaited[number] = Awaited(handle, deliver)
    return number


def poll(handle: int) -> bool:
    """Return whether an asynchronous operation has ended. Does not wait.

    Args:
        handle: A number that an asynchronous function returned.

    Returns:
        True if `synchronize` would return at once.

    Raises:
        ValueError: The handle is unknown, or has been synchronized.
        TypeError: `handle` is not a number.
    """
    require_handle(handle)
    if handle not in _awaited:
        raise ValueError(f"{handle} is not a pending handle: unknown, or already synchronized")
    return _awaited[handle].handle.done


def synchronize(handle: int | Callable[[], object]) -> Any:
    """Wait for an asynchronous operation. Every rank must have called that operation.

    Args:
        handle: A number that an asynchronous function returned, or the function that `sparse_allreduce_async` returned.

    Returns:
        The operation's result. As in Horovod, None if the handle has been synchronized before.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it.
        TypeError: `handle` is neither a number nor a function.
    """
    if callable(handle):
        return handle()
    require_handle(handle)
    awaited = _awaited.get(handle)
    if awaited is None:
        return None
    try:
        result = awaited.handle.wait()
    finally:
        if awaited.handle.done:  # else a signal's handler has raised, and the user may wait again
            _awaited.pop(handle, None)
    return awaited.deliver(result)


def require_handle(handle: object) -> None:
    """Raise TypeError if `handle` is not a number."""
    if not isinstance(handle, Integral):
        raise TypeError(f"a handle is what an asynchronous function (_async) returned, not {type(handle).__name__}")
