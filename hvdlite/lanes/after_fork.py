"""Lanes in a forked child, where the threads that used them do not exist."""

from __future__ import annotations

from hvdlite.errors import ForkedError
from hvdlite.lanes.lane import Lane
from hvdlite.system.float_environment import quiet_runner


def orphan(lane: Lane) -> None:
    """Close a lane over MPI, which the child may not touch; observers write no more."""
    lane.changed.renew()
    lane.observers = ()
    lane.close(ForkedError())


def go_on(lane: Lane) -> None:
    """A lane without MPI goes on, with a thread of its own once it needs one. What was under way fails."""
    lane.changed.renew()
    lane.thread, lane.busy, lane.lent = None, False, False
    lane.quietly = quiet_runner()  # the other may be in use for ever
    for request in list(lane.pending.values()):
        if request not in lane.queue:
            lane.settle(request, error=ForkedError())
    if lane.queue:
        with lane.changed.lock:
            lane.wake()
