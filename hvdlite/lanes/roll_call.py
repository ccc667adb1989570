"""The roll call: before each request the ranks agree, with one tiny all-reduce, that it is the same one everywhere.

The all-reduce is a MAX over five 64-bit integers, `[h, -h, flag, count, -count]`, where h is the digest of the
request's signature. All digests are equal exactly when max(h) == -max(-h). In the same way all ranks learn whether
their counts are equal, which need not be so: of an all-gather the count is the number of rows, and where these are
equal, no message has to carry them. The roll call doubles as the entry barrier of the shared-memory algorithms. Ranks
that share memory call the roll there, except for a lane's first call (`transports.shared_flags`).

The all-reduce is non-blocking and tested in a loop that yields the core, so that a waiting rank takes Ctrl-C and lets
others compute. Rejected: a coordinator (Horovod), which costs a cycle time per operation and traffic when idle; and no
agreement at all (DDP), which hangs or adds unlike tensors when ranks differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from hvdlite.gpu_streams import in_mpi
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import LEAVE
from hvdlite.lanes.workplace import HostWorkplace
from hvdlite.transports import LOOKS, Maximum, Pending

VALUES = 5
SPIN_SECONDS = 0.002  # a longer wait means that a peer computes: stop burning the core
SHORTEST_NAP, LONGEST_NAP = 0.0001, 0.001
IDLE_NAP = 0.01  # for a rank that is waited for over seconds: it writes a checkpoint, say


class RollCall:
    """The agreements of one lane, one after another.

    Attributes:
        host: The lane's workplace.
        check: Called while waiting; raises when the wait is to be given up.
        hurry: Tells whether a thread of the user's waits meanwhile, rather than computes.
        maximum: What makes the all-reduce: messages, or memory that all ranks share.
        try_memory: Whether to look for such memory after the next call.
    """

    def __init__(self, host: HostWorkplace, check: Callable[[], None], hurry: Callable[[], bool]) -> None:
        self.host, self.check, self.hurry = host, check, hurry
        self.maximum: Maximum = host.transport.maximum(VALUES)
        self.try_memory = host.place.in_memory and host.place.one_host

    def agrees(self, request: Request[Any]) -> bool:
        """Return whether all ranks called with the same request; if so, set its flag and `equal_counts`.

        Collective; waits for all ranks. After the first call of a lane whose ranks share memory, unless they leave, the
        following calls use that memory.
        """
        digest, count, maximum = request.identity.digest, request.count, self.maximum
        if not maximum.start((digest, -digest, request.flag, count, -count)):
            wait(maximum, self.check, self.hurry)
        largest, minus_least, flag, most, minus_fewest = maximum.values
        if largest != -minus_least:
            return False
        request.flag, request.equal_counts = flag, most == -minus_fewest
        if self.try_memory and not request.is_a(LEAVE):
            self.try_memory = False
            shared = in_mpi(self.host.workspace.agree_in_memory, self.host.transport, self.host.place.hosts)
            self.maximum = shared or maximum
        return True

    def close(self) -> None:
        """Let go of the memory, while graphs of an earlier backward may keep the lane."""
        del self.maximum


def wait(pending: Pending, check: Callable[[], None], hurry: Callable[[], bool]) -> None:
    """Wait for an agreement.

    While somebody waits for it (`hurry`), spin politely at first, then nap for a twentieth of the time waited.
    Otherwise nap for a quarter of that time, since each look costs some 40 us of a core that computes. Naps grow to
    LONGEST_NAP, and in waits of seconds to IDLE_NAP.

    Args:
        check: Called before each nap; raises when the wait is to be given up.
    """
    for _ in range(LOOKS):  # most are over by then
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
