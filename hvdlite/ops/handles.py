"""Handles of asynchronous operations: plain numbers, as in Horovod, whatever framework the operation was called in."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import cleandoc, signature
from itertools import count
from numbers import Integral
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

from hvdlite.lanes.request import Handle


@dataclass(frozen=True)
class Awaited:
    """A request's handle and how its result becomes the user's tensor."""

    handle: Handle[Any]
    deliver: Callable[[Any], Any]


_awaited: dict[int, Awaited] = {}
_numbers = count(1)


def remember(handle: Handle[Any], deliver: Callable[[Any], Any] = lambda result: result) -> int:
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


def require_handle(handle: Any) -> None:
    if not isinstance(handle, Integral):
        raise TypeError(f"a handle is what an asynchronous function (_async) returned, not {type(handle).__name__}")


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Call(NamedTuple, Generic[R]):
    """An operation that can be run in both ways. start(wait=...): its result, or a request's handle."""

    start: Callable[..., Any]
    deliver: Callable[[Any], R] = lambda result: result


def waiting(prepare: Callable[P, Call[R]]) -> Callable[P, R]:
    """The function that runs what `prepare` prepares, and returns its result."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        prepared = prepare(*args, **kwargs)
        return prepared.deliver(prepared.start(wait=True))

    return presented(call, prepare, "", prepare.__annotations__["return"].removeprefix("Call[").removesuffix("]"))


def later(prepare: Callable[P, Call[R]]) -> Callable[P, int]:
    """The function that starts what `prepare` prepares, and returns a number for `synchronize`."""

    def call(*args: P.args, **kwargs: P.kwargs) -> int:
        prepared = prepare(*args, **kwargs)
        return remember(prepared.start(wait=False), prepared.deliver)

    text = cleandoc(prepare.__doc__ or "")  # none under python -OO
    call.__doc__ = f"{text}\n\nAsynchronous: returns a number, for which `synchronize` gives the result."
    return presented(call, prepare, "_async", "int")


def presented(call: Callable[P, T], prepare: Callable[P, Any], ending: str, returned: str) -> Callable[P, T]:
    """The call as `help` and `pickle` are to know it: `_allreduce_` prepares `allreduce_` and `allreduce_async_`."""
    stem, in_place = prepare.__name__.strip("_"), "_" * prepare.__name__.endswith("_")
    call.__name__ = call.__qualname__ = f"{stem}{ending}{in_place}"
    call.__module__, call.__doc__ = prepare.__module__, call.__doc__ or prepare.__doc__
    call.__signature__ = signature(prepare).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call
