"""The roll call: before each request the ranks agree, with one tiny all-reduce, that it is the same one everywhere.

The all-reduce is a MAX over five 64-bit integers, `[h, -h, flag, count, -count]`, where h is the digest of the
request's signature. All digests are equal exactly when max(h) == -max(-h). In the same way all ranks find out whether
their counts are equal. Counts may differ: an all-gather's count is its number of rows, and equal numbers need not be
exchanged. The roll call is also the entry barrier of the shared-memory algorithms. Ranks that share memory call the
roll there, except for a lane's first call (`transports.shared_flags`).

The all-reduce is non-blocking and tested in a loop that yields the core. So a waiting rank takes Ctrl-C, and other
processes may compute. Rejected: a coordinator (Horovod), which costs a cycle time per operation and traffic when idle;
and no agreement at all (DDP): if ranks differ, that hangs or adds different tensors.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

from hvdlite.gpu_streams import in_mpi
from hvdlite.lanes.request import Request, T
from hvdlite.lanes.signature import LEAVE
from hvdlite.lanes.workplace import HostWorkplace
from hvdlite.transports import LOOKS, Maximum, Pending

VALUES = 5
SPIN_SECONDS = 0.002  # after a longer wait another rank probably computes: leave the core to it
SHORTEST_NAP, LONGEST_NAP = 0.0001, 0.001
IDLE_NAP = 0.01  # the longest nap in a wait of seconds, while another rank writes a checkpoint, for example


class Unanswered(Exception):
    """Other ranks have not called in time. The roll call stays open: `agrees` with the same request continues it."""


class RollCall:
    """The agreements of one lane, one after another.

    Attributes:
        host: The lane's workplace.
        check: Called while waiting. It raises an error to end the wait.
        hurry: Returns whether a thread of the user waits, and does not compute.
        maximum: Does the all-reduce, by messages or in shared memory.
        try_memory: Whether to change to shared memory after the next call.
        open: The request of a roll call that has begun and that no thread waits for, after `Unanswered`.
    """

    def __init__(self, host: HostWorkplace, check: Callable[[], None], hurry: Callable[[], bool]) -> None:
        self.host, self.check, self.hurry = host, check, hurry
        self.maximum: Maximum = host.transport.maximum(VALUES)
        self.try_memory = host.place.in_memory and host.place.one_host
        self.open: Request[Any] | None = None

    def agrees(self, request: Request[T], until: float = math.inf) -> bool:
        """Return whether all ranks called with the same request. If so, request and workplace note what was agreed.

        Collective; waits for all ranks. If the lane's ranks share memory, its first call prepares that memory for later
        ones, unless the ranks leave.

        Args:
            request: This rank's request.
            until: The longest wait, as a time of `time.monotonic()`. Then this raises `Unanswered`.
        """
        digest, count, maximum = request.identity.digest, request.count, self.maximum
        if self.open is request or not maximum.start((digest, -digest, request.flag, count, -count)):
            self.open = request
            wait(maximum, lambda: self.check_at(until), self.hurry)
            self.open = None
        largest, minus_least, flag, most, minus_fewest = maximum.values
        if largest != -minus_least:
            return False
        request.agree(flag)
        self.host.agree(most == -minus_fewest)
        if self.try_memory and not request.is_a(LEAVE):
            self.try_memory = False
            shared = in_mpi(self.host.workspace.agree_in_memory, self.host.transport, self.host.place.hosts)
            self.maximum = shared or maximum
        return True

    def check_at(self, until: float) -> None:
        """`check`, with a time limit."""
        self.check()
        if time.monotonic() >= until:
            raise Unanswered

    def close(self) -> None:
        """Drop the shared memory. (Graphs of an earlier backward may keep the lane itself.)"""
        del self.maximum


def wait(pending: Pending, check: Callable[[], None], hurry: Callable[[], bool]) -> None:
    """Wait for an agreement.

    While a thread of the user waits (`hurry`), yield the core between tests at first, then nap for a twentieth of the
    time waited. Otherwise nap for a quarter of that time, since each test takes some 40 us from a core that computes.
    Naps grow to LONGEST_NAP, and in waits of seconds to IDLE_NAP.

    Args:
        pending: The agreement.
        check: Called before each nap. It raises an error to end the wait.
        hurry: As for `RollCall`.
    """
    for _ in range(LOOKS):  # most agreements are complete by then
        if pending.test():
            return
    began = time.monotonic()
    while not pending.test():
        waited, awaited = time.monotonic() - began, hurry()
        if awaited and waited < SPIN_SECONDS:
            os.sched_yield()
        else:
            check()
            longest = min(max(LONGEST_NAP, waited / 1000), IDLE_NAP)
            time.sleep(min(longest, max(SHORTEST_NAP, waited / (20 if awaited else 4))))
            if any(pending.test() for _ in range(LOOKS)):
                return
