"""A round as it usually is, in two functions: all gradients in one bucket, on a lane that is idle.

On its way through `Reducer.finish_round` and `Lane.begin` it comes to some twenty of Python's, each of which takes 2 to
5 us behind a training step, when nothing is in the caches. These are their steps, in their order; what is not as usual
takes that way. (A CNN with 18 gradients: with `torch._usual`, a seventh of what hvdlite's own code takes, 0.48-0.64 ms,
medians of four runs in turns.)
"""

from __future__ import annotations

import time
from operator import mul
from threading import get_ident
from typing import TYPE_CHECKING

from hvdlite.errors import broken_by
from hvdlite.gpu_streams import GPUS_IN_MESSAGES, NOTHING_PENDING, in_mpi
from hvdlite.lanes.lane import THREADS, Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.roll_call import wait
from hvdlite.lanes.signature import BITS, ODD, Round

if TYPE_CHECKING:
    from hvdlite.gradients.reducer import Reducer


def finished(reducer: Reducer, tag: Round) -> bool:
    """`Reducer.finish_round` where every gradient lies in its view or is lent: complete the round. Waits for all ranks.
    False where something is not as usual: then that is to go on. tag: names the round on all ranks."""
    reducer.begun, whole, (bucket, *others) = True, reducer.requests.get(0), reducer.buckets
    usual = not (others or reducer.sent or reducer.trial or reducer.learn)
    if usual and whole is not None and run_again(reducer.lane, whole, tag):
        if whole.handle.result and not whole.flag:
            reducer.begun, reducer.marked = False, bytearray(len(reducer.marked))
            bucket.lent.clear()
            return True
        reducer.sent.append((whole, whole.handle))
    reducer.marked = bytearray(b"\1") * len(reducer.marked)
    return False


def run_again(lane: Lane, request: Request, round: Round) -> bool:
    """Run the request in the calling thread, on a lane of several ranks that is idle, and that nobody observes. False
    otherwise: then nothing has been done. Afterwards it is done or, where ranks differ, left to the lane's thread.
    Waits for all ranks. Nobody else may have the request's handle, which is used again."""
    me, handle, mine, result, error = get_ident(), request.handle, False, None, None
    try:
        with lane.changed.lock:
            if (
                lane.busy or lane.queue or lane.closed or lane.observers or not handle.done or handle.error
                or request.ready is not NOTHING_PENDING or GPUS_IN_MESSAGES
            ):  # fmt: skip
                return False
            mine, lane.lender = True, me
            lane.busy = lane.lent = True
            request.round, request.digest = round, (request.timeless + sum(map(mul, round.numbers, ODD))) & BITS
            request.flag, request.begun, request.agreed = 0, False, 0.0  # this and the line above: `Request.again`
            handle.done, handle.result, request.queued = False, None, time.monotonic()
            lane.callers[me] = THREADS.get(me)
            lane.calls += 1
            lane.pending[request.key] = request
        digest, maximum, request.begun = request.digest, lane.maximum, True
        if not maximum.start((digest, -digest, 0, 0, 0)):
            wait(maximum, lane.check, lane.hurried)
        largest, minus_least, flag, *_ = maximum.values
        common = largest == -minus_least
        if common:
            request.flag, request.agreed = flag, time.monotonic()
            try:
                result = in_mpi(lane.quietly, request.work, lane)
            except Exception as raised:
                error = raised
        with lane.changed.lock:
            if not common:
                lane.queue.appendleft(request)
                lane.disagreed = True
            elif lane.pending.pop(request.key, None) is not None:  # else the lane was closed meanwhile
                handle.result, handle.error, handle.done = result, error, True
            lane.busy = lane.lent = False
            if lane.queue:
                lane.wake()
    except BaseException as raised:
        if mine:
            if request.begun and not handle.done:
                lane.interrupted(request, raised)
            lane.take_back(request)
        raise
    if error is not None and (reason := broken_by(error, request.title(lane.user))):
        lane.break_off(reason)
    return True
