"""The requests of one lane on this rank: those that wait for their turn, and the one under way.

The queue also knows which threads call and wait, and why no request can follow any more (`closed`). All fields change
under its lock (`changed.lock`); observers and other modules may look at them without it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hvdlite.errors import HvdliteError
from hvdlite.lanes.observer import Observer, Seat
from hvdlite.lanes.request import Changed, Handle, Request, T

THREADS: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
"""Python's threads. `threading.current_thread()` would make a lasting entry for a thread that C code started."""


class Queue:
    """Requests in the order in which they were called.

    Attributes:
        seat: This rank's place on the lane, for observers.
        observers: Learn of each request. The list may change while the lane lives.
        changed: The lane's lock and its conditions.
        requests: Requests that have not begun, or that other ranks have answered with different ones.
        pending: By key, the requests that wait or are under way.
        callers: The threads that have ever called; None for a thread that Python did not start.
        calls: Requests admitted since all ranks last joined.
        closed: Why no request can follow; None while requests can.
    """

    def __init__(self, seat: Seat, observers: Sequence[Observer]) -> None:
        self.seat, self.observers = seat, observers
        self.changed = Changed()
        self.requests: deque[Request[Any]] = deque()
        self.pending: dict[str, Request[Any]] = {}
        self.callers: dict[int, threading.Thread | None] = {}
        self.calls = 0
        self.closed: HvdliteError | None = None

    def refuse(self, key: str, title: str) -> None:
        """Raise the reason where a request cannot be admitted. title: its name in messages.

        Raises:
            HvdliteError: The queue is closed.
            ValueError: A request of this key is pending.
        """
        if self.closed:
            raise self.closed.with_traceback(None)  # the traceback of an earlier call would keep its frames alive
        if key in self.pending:
            raise ValueError(f"{title} is in flight already: wait for it (synchronize), or give this one another name.")

    def admit(self, request: Request[T]) -> None:
        """Make a request pending. `refuse` comes before."""
        caller = threading.get_ident()
        request.handle = Handle(self.changed)
        request.queued = time.monotonic()
        self.callers[caller] = THREADS.get(caller)
        self.calls += 1
        self.pending[request.key] = request
        for observer in self.observers:
            observer.queued(self.seat, request)

    def dismiss(self, request: Request[Any]) -> None:
        """Undo `admit` for a request that has not begun."""
        if not request.begun and self.pending.get(request.key) is request:
            del self.pending[request.key]
            self.calls -= 1

    def settle(self, request: Request[T], result: T | None = None, error: BaseException | None = None) -> bool:
        """Finish a request's handle. Returns False where `close` has finished it already."""
        if self.pending.pop(request.key, None) is None:
            return False
        request.handle.finish(result, error)
        return True

    def close(self, reason: HvdliteError) -> list[Request[Any]]:
        """Admit nothing any more, for this reason or that of an earlier call. Returns the requests to be failed."""
        self.closed = self.closed or reason
        self.requests = deque()
        self.changed.called.notify()
        return list(self.pending.values())

    def count_anew(self) -> None:
        """All ranks have joined: count calls from 0."""
        self.calls = 0

    def living_callers(self) -> set[int]:
        """The threads that have ever called, without those of Python's that have ended."""
        return {ident for ident, thread in list(self.callers.items()) if thread is None or thread.is_alive()}

    def all_wait(self) -> bool:
        """Whether every thread that has ever called waits for a result."""
        return self.living_callers() == self.changed.waiters()
