"""The interface of observers, which a lane notifies of each request, and of the waits of the user's threads.

An observer records events, as the timeline and the meter do, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from hvdlite.lanes.request import Request, T, WaitObserver


class Seat(NamedTuple):
    """A rank's place on a lane.

    Attributes:
        members: The lane's global ranks.
        rank: The index of this rank among them.
    """

    members: Sequence[int]
    rank: int


class Observer(WaitObserver, Protocol):
    """Records a lane's events. The lane calls its methods in the thread of the event. They return soon, and never
    raise.
    """

    def queued(self, seat: Seat, request: Request[T]) -> None:
        """This rank has called the request."""
        ...

    def agreed(self, seat: Seat, request: Request[T]) -> None:
        """All ranks have called the request, and its work begins."""
        ...

    def done(self, seat: Seat, request: Request[T]) -> None:
        """The request's handle has its result, or its error (`request.handle.error`).

        If ranks differed, or a rank has left, `done` comes without `agreed`.
        """
        ...
