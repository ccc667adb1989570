"""The requests of one lane on this rank: the waiting requests and the one under way.

The queue also records which threads call and wait, and the error of later calls once it is closed. All fields change
under the lock `changed.lock`. Observers and other modules may read them without it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from hvdlite.errors import HvdliteError
from hvdlite.lanes.observer import Observer, Seat
from hvdlite.lanes.request import Changed, Handle, Request, T

THREADS: dict[int, threading.Thread] = threading._active  # type: ignore[attr-defined]
"""Python's threads. `threading.current_thread()` would make a lasting entry for a thread that C code started."""


class Queue:
    """A lane's requests, in the order of the calls.

    Attributes:
        seat: This rank's place on the lane, for observers.
        observers: Notified of each request. The list may change while the lane lives.
        changed: The lane's lock and its conditions.
        requests: The requests that have not begun, and those that differ from other ranks' in a roll call.
        pending: By key, the requests that wait or are under way.
        callers: By identifier, the threads that have called; None for a thread that Python did not start.
        calls: The number of requests admitted since all ranks last joined.
        closed: The error of later calls; None while the queue is open.
    """

    def __init__(self, seat: Seat, observers: Sequence[Observer]) -> None:
        self.seat, self.observers = seat, observers
        self.changed = Changed(observers)
        self.requests: deque[Request[Any]] = deque()
        self.pending: dict[str, Request[Any]] = {}
        self.callers: dict[int, threading.Thread | None] = {}
        self.calls = 0
        self.closed: HvdliteError | None = None

    def refuse(self, request: Request[T], user: str) -> None:
        """Raise an error if the request cannot be admitted. user: as for `Request.title`.

        Raises:
            HvdliteError: The queue is closed.
            ValueError: A request of this key is pending.
        """
        if self.closed:
            raise self.closed.with_traceback(None)  # the traceback of an earlier call would keep its frames alive
        if request.key in self.pending:
            title = request.title(user)
            raise ValueError(
                f"{title} is in flight already: wait for it (synchronize), or give this one another name. [HVD208]"
            )

    def admit(self, request: Request[T]) -> None:
        """Make a request pending, after `refuse` has raised no error."""
        caller = threading.get_ident()
        request.enter(Handle(self.changed))
        self.callers[caller] = THREADS.get(caller)
        self.calls += 1
        self.pending[request.key] = request
        for observer in self.observers:
            observer.queued(self.seat, request)

    def dismiss(self, request: Request[T]) -> None:
        """Undo `admit` for a request that has not begun."""
        if not request.begun and self.pending.get(request.key) is request:
            del self.pending[request.key]
            self.calls -= 1

    def settle(self, request: Request[T], result: T | None = None, error: BaseException | None = None) -> bool:
        """Finish a request's handle. Returns False if the request is no longer pending."""
        if self.pending.pop(request.key, None) is None:
            return False
        request.handle.finish(result, error)
        return True

    def close(self, reason: HvdliteError) -> list[Request[Any]]:
        """Close the queue with this error, or an earlier call's. Returns the pending requests, which must fail."""
        self.closed = self.closed or reason
        self.requests = deque()
        self.changed.called.notify()
        return list(self.pending.values())

    def orphan(self) -> None:
        """Make new locks in a forked child, and drop the observers."""
        self.changed.orphan()
        self.observers = ()

    def count_anew(self) -> None:
        """Count calls from 0, since all ranks have joined."""
        self.calls = 0

    def living_callers(self) -> set[int]:
        """The threads that have called, without Python's threads that have ended."""
        return {ident for ident, thread in list(self.callers.items()) if thread is None or thread.is_alive()}

    def all_wait(self) -> bool:
        """Whether every living thread that has called waits for a result."""
        return self.living_callers() == self.changed.waiters()
