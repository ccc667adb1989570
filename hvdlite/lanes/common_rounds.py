"""Common rounds: what the ranks of a lane do when a roll call has found different requests.

They exchange what each has queued, run what all have, in rank 0's order, and report as an error on all ranks what all
have under one name but with different facts, or, once nothing else can come, of different kinds. They leave together,
once all queues are empty.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import in_mpi
from hvdlite.lanes.matching import Verdicts, has_joined, match, refusal
from hvdlite.lanes.request import Call, Request, visible

if TYPE_CHECKING:
    from hvdlite.lanes.lane import Lane

SHORTEST_NAP, LONGEST_NAP = 0.0001, 0.01
CLASH_SECONDS = 10.0  # without a new call one name that stands for different kinds on different ranks is an error


def rounds(lane: Lane) -> None:
    """Match requests by name until no rank has any left, but to wait for others to join. Collective."""
    nap, since = SHORTEST_NAP, time.monotonic()
    before: list[Request] = []
    while not lane.closed:
        with lane.changed.lock:
            mine, stuck = visible(lane.queue), lane.stuck
        if mine != before:
            before, since = mine, time.monotonic()
        stuck = stuck or time.monotonic() - since > CLASH_SECONDS
        for request in mine:
            request.ready.wait()
        said = in_mpi(lane.transport.allgather_object, ([request.call(lane.user) for request in mine], stuck))
        everyone = [calls for calls, _ in said]
        queues = [[call.signature for call in calls] for calls in everyone]
        if all(not queue or has_joined(queue) for queue in queues):
            return
        verdicts = match(queues, lane.members, all(stuck for _, stuck in said))
        joined = [rank for rank, queue in zip(lane.members, queues, strict=True) if has_joined(queue)]
        carry_out(lane, verdicts, mine, [call for calls in everyone for call in calls], joined)
        nap = SHORTEST_NAP if verdicts else min(2 * nap, LONGEST_NAP)
        if not verdicts:
            time.sleep(nap)


def carry_out(
    lane: Lane, verdicts: Verdicts, mine: Sequence[Request], everyones: Sequence[Call], joined: Sequence[int]
) -> None:
    """Run or fail what has a verdict, errors first. joined: these ranks take part with zeros, if they can."""
    requests = {request.signature.key: request for request in mine}
    calls: dict[str, list[Call]] = {key: [] for key in verdicts}
    for call in everyones:
        calls.get(call.signature.key, []).append(call)
    errors = {key: error for key, error in verdicts.items() if error}
    if joined:
        errors |= {key: refusal(same[0].signature, joined) for key, same in calls.items()
                   if key not in errors and same[0].stand_in is None}  # fmt: skip
    for key in sorted(verdicts, key=lambda key: key not in errors):
        if request := requests.get(key):
            with lane.changed.lock:
                if lane.closed:
                    return
                lane.queue.remove(request)
            if key in errors:
                lane.settle(request, error=errors[key])
            else:
                request.flag = max(call.flag for call in calls[key])
                request.alike = not joined and len({call.count for call in calls[key]}) == 1
                lane.without_all = bool(joined)
                lane.execute(request)
                lane.without_all = False
        elif key not in errors and (stand_in := calls[key][0].stand_in):  # this rank has joined
            with contextlib.suppress(HvdliteError):  # the others have it, too, and tell
                lane.quietly(stand_in, lane)
