"""The roll call: before each request the ranks agree, with one tiny all-reduce, that it is the same one everywhere.

MAX over five 64-bit integers, `[h, -h, flag, count, -count]`, where h digests the request's signature: all equal
exactly when max(h) == -max(-h). In the same way all learn whether their counts are equal, which need not be: of an
all-gather the rows, which need no message of their own then. It doubles as the entry barrier of the shared-memory
algorithms; ranks that share memory call the roll there, too, but for a lane's first call (`transports.shared_flags`).
Non-blocking and tested in a loop that gives up the core, so that a waiting rank takes Ctrl-C and lets others compute.
Rejected: a coordinator (Horovod), which costs a cycle time per operation and traffic when idle; and no agreement at all
(DDP), which hangs or adds apples to pears when ranks differ.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite.gpu_streams import in_mpi
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import LEAVE
from hvdlite.transports import LOOKS, Pending

if TYPE_CHECKING:
    from hvdlite.lanes.lane import Lane

VALUES = 5
SPIN_SECONDS = 0.002  # a longer wait means that a peer computes: stop burning the core
SHORTEST_NAP, LONGEST_NAP = 0.0001, 0.001
IDLE_NAP = 0.01  # where a rank is waited for for seconds: it writes a checkpoint


def wait(pending: Pending, check: Callable[[], None], hurry: Callable[[], bool]) -> None:
    """Wait for an agreement: while somebody is waiting for it (`hurry`) spinning politely at first, then in naps of a
    twentieth of the time waited; else in naps of a quarter, for each costs some 40 us of a core that computes. They
    grow to LONGEST_NAP, and in waits of seconds to IDLE_NAP.

    check: called before each nap; raises when the wait is to be given up.
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


def agreed(lane: Lane, request: Request) -> bool:
    """True when all ranks called with the same request; then sets request.flag to the largest one, and request.alike.
    Collective. The first time, unless they leave, it also makes what they agree by from then on, where they share
    memory."""
    digest, count, maximum = request.digest, request.count, lane.maximum
    if not maximum.start((digest, -digest, request.flag, count, -count)):
        wait(maximum, lane.check, lane.hurried)
    largest, minus_least, flag, most, minus_fewest = maximum.values
    if largest != -minus_least:
        return False
    request.flag, request.alike = flag, most == -minus_fewest
    if lane.may_agree_in_memory and request.first is not LEAVE:
        lane.may_agree_in_memory = False
        shared = in_mpi(lane.workspace.agree_in_memory, lane.transport, lane.place.hosts)
        lane.maximum = shared or maximum
    return True
