"""The stall watch's view of this rank: its pending requests, their ages, and whether it is stuck.

A rank is stuck if only other ranks can make it go on. Time in which the process was stopped does not count. Requests to
join or leave do not count as waits.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import JOIN, LEAVE
from hvdlite.observers.diagnosis import Report, Wait
from hvdlite.observers.positions import main_position, own_threads, threads_in_steps, threads_of_users

SUSPENSION = 2.0  # seconds by which a look is late only if the process was stopped
MOST_WAITS = 1000  # in a report


class Board:
    """What this rank waits for. The time in which its process was stopped does not count.

    Attributes:
        lanes: Returns the lanes that exist now.
        tick: The usual time between two looks, in seconds.
        woke: When the process last went on after it was stopped.
        looked: When the last look ended.
    """

    def __init__(self, lanes: Callable[[], list[Lane]], tick: float) -> None:
        self.lanes = lanes
        self.tick = tick
        self.woke = 0.0
        self.looked = time.monotonic()

    def note_suspension(self, now: float) -> None:
        """A look begins. If it is very late, the process was stopped: Ctrl-Z, or a scheduler that takes turns."""
        if now - self.looked > self.tick + SUSPENSION:
            self.woke = now
        self.looked = now

    def note_look(self) -> None:
        """A look has ended. It may have taken long, because it has printed a report."""
        self.looked = time.monotonic()

    def since(self, moment: float) -> float:
        """Seconds since then, or since the process went on, if that was later."""
        return time.monotonic() - max(moment, self.woke)

    def longest_wait(self) -> float:
        """The age of the oldest pending request in seconds. Patient requests do not count."""
        pending = [request for lane in self.lanes() for request in list(lane.queue.pending.values())]
        queued = [request.queued for request in pending if request.queued and not patient(request)]
        return self.since(min(queued)) if queued else 0.0

    def report(self) -> Report:
        """What this rank waits for, and where it is."""
        waits = [
            Wait(lane.name, tuple(lane.members), key, self.since(request.queued),
                 self.since(request.agreed) if request.agreed else 0.0, request.queued, request.title(lane.user))
            for lane in self.lanes() for key, request in list(lane.queue.pending.items())
            if not patient(request)
        ]  # fmt: skip
        oldest = sorted(waits, key=lambda wait: wait.called)[:MOST_WAITS]
        joined = frozenset((lane.name, tuple(lane.members)) for lane in self.lanes() if JOIN.key in lane.queue.pending)
        return Report(main_position(), tuple(oldest), joined, self.stuck and len(waits) <= MOST_WAITS)

    @property
    def stuck(self) -> bool:
        """Whether only other ranks can make this rank go on.

        The main thread waits, no other thread calls hvdlite or runs the user's code, and this rank is not about to
        answer any call. A thread of TensorFlow calls on behalf of the thread that runs a step.
        """
        lanes = self.lanes()
        main = threading.main_thread().ident or 0
        lenders = {lane.turn.lender for lane in lanes if lane.turn.lent}
        waiting = lenders.union(*(lane.queue.changed.waiters() for lane in lanes))
        callers = set().union(*(lane.queue.living_callers() for lane in lanes))
        if "tensorflow" in sys.modules:
            in_steps, own = threads_in_steps(), own_threads()
            if in_steps == {main} and waiting - own:
                waiting.add(main)
            if in_steps <= {main}:
                callers &= own
        waits = main in waiting and callers | (threads_of_users() - waiting) <= {main}
        return waits and not any(patient(each) for lane in lanes for each in list(lane.queue.pending.values()))


def patient(request: Request[object]) -> bool:
    """Whether the request waits for other ranks' work to end, however long that takes: to shut down, or to join."""
    return request.is_a(LEAVE) or request.is_a(JOIN)
