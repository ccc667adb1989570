"""Observers look at lanes from outside: they are told what happens to requests and change nothing.

A lane with no observer pays for three loops over an empty list per request (~0.1 us). The stall watch (`stall`) is not
even told: it looks at what is pending, now and then, from a thread of its own. The timeline is an `Observer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from hvdlite.lanes.lane import Lane
    from hvdlite.lanes.request import Request


class Observer(Protocol):
    """Called in whatever thread the event happens, which waits for it: note and return, and never raise."""

    def queued(self, lane: Lane, request: Request) -> None:
        """This rank has called it."""
        ...

    def agreed(self, lane: Lane, request: Request) -> None:
        """All ranks have called it, and its work begins."""
        ...

    def done(self, lane: Lane, request: Request) -> None:
        """Its handle has its result or error (`request.handle.error`). Without `agreed` before where ranks differed,
        or where one has left."""
        ...
