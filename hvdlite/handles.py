"""Handles of asynchronous operations: plain numbers, as in Horovod, whatever framework the operation was called in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from itertools import count
from typing import Any, NamedTuple, ParamSpec

from hvdlite.requests import Handle


@dataclass(frozen=True)
class Awaited:
    """A request's handle and how its result becomes the user's tensor."""

    handle: Handle
    deliver: Callable[[Any], Any]


_awaited: dict[int, Awaited] = {}
_numbers = count(1)


def remember(handle: Handle, deliver: Callable[[Any], Any] = lambda result: result) -> int:
    """A number for the handle. deliver: called once, by `synchronize`, with the request's result."""
    number = next(_numbers)
    _awaited[number] = Awaited(handle, deliver)
    return number


def poll(handle: int) -> bool:
    """Whether synchronize(handle) would return at once. Raises ValueError for a handle that is not pending."""
    if handle not in _awaited:
        raise ValueError(f"{handle} is not a pending handle: unknown, or already synchronized")
    return _awaited[handle].handle.poll()


def synchronize(handle: int | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation; its output. None for a handle already synchronized, as in Horovod. What waits
    itself, as `sparse_allreduce_async` returns it, is called."""
    if callable(handle):
        return handle()
    awaited = _awaited.get(handle)
    if awaited is None:
        return None
    try:
        result = awaited.handle.wait()
    finally:
        if awaited.handle.done:  # else a signal's handler has raised: it can be awaited again
            _awaited.pop(handle, None)
    return awaited.deliver(result)


P = ParamSpec("P")


class Call(NamedTuple):
    """An operation that can be run in both ways. start(wait=...): its result, or a request's handle."""

    start: Callable[..., Any]
    deliver: Callable[[Any], Any] = lambda result: result


def waiting(prepare: Callable[P, Call]) -> Callable[P, Any]:
    """The function that runs what `prepare` prepares, and returns its result."""

    @wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> Any:
        prepared = prepare(*args, **kwargs)
        return prepared.deliver(prepared.start(wait=True))

    return call


def later(prepare: Callable[P, Call]) -> Callable[P, int]:
    """The function that starts what `prepare` prepares, and returns a number for `synchronize`."""

    @wraps(prepare)
    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        prepared = prepare(*args, **kwargs)
        return remember(prepared.start(wait=False), prepared.deliver)

    return call
