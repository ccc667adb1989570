"""Common rounds: the ranks of a lane match their queues, after a roll call has found different requests.

In each round the ranks exchange the signatures of their queued requests. They run the requests that all ranks have, in
rank 0's order. Joined ranks need no request: they run stand-ins. If rank 0 has joined, the first rank that has not
joined gives the order. If requests of one name have different facts, they fail on all ranks. Requests of one name but
different kinds fail once every rank is stuck. A rank is stuck if it cannot call more, or has called nothing new for ten
seconds. A request also fails if a rank has shut down without calling it. Common rounds end on all ranks together, when
no rank has a request left except `hvd.join()`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import in_mpi
from hvdlite.lanes.matching import Verdicts, has_joined, match, refusal
from hvdlite.lanes.queue import Queue
from hvdlite.lanes.request import Call, Request, StandIn, T, visible
from hvdlite.lanes.workplace import HostWorkplace

SHORTEST_NAP, LONGEST_NAP = 0.0001, 0.01
CLASH_SECONDS = 10.0
"""A rank without a new call for so long counts as stuck. If all ranks are stuck, different kinds of operation under one
name are an error.
"""


class Performer(Protocol):
    """Carries out verdicts. A lane does."""

    @property
    def user(self) -> str:
        """The optimizer or tape that the lane belongs to, in messages."""
        ...

    def stuck(self) -> bool:
        """Whether this rank will call no other request before one of the waiting requests is done."""
        ...

    def execute(self, request: Request[T]) -> None:
        """Do the work of a request that all ranks have called."""
        ...

    def settle(self, request: Request[T], result: T | None = None, error: BaseException | None = None) -> None:
        """Finish a request with a result or an error."""
        ...

    def stand_in(self, work: StandIn) -> None:
        """Take part in an operation of other ranks, after this rank has joined."""
        ...


class CommonRounds:
    """The common rounds of one lane.

    Attributes:
        queue: The lane's requests.
        host: The lane's workplace.
        lane: Carries out verdicts.
    """

    def __init__(self, queue: Queue, host: HostWorkplace, lane: Performer) -> None:
        self.queue, self.host, self.lane = queue, host, lane

    def run(self) -> None:
        """Match requests by name until no rank has any left, apart from JOIN. Collective; waits for all ranks."""
        nap, since = SHORTEST_NAP, time.monotonic()
        before: list[Request[Any]] = []
        while not self.queue.closed:
            with self.queue.changed.lock:
                mine, stuck = visible(self.queue.requests), self.lane.stuck()
            if mine != before:
                before, since = mine, time.monotonic()
            stuck = stuck or time.monotonic() - since > CLASH_SECONDS
            for request in mine:
                request.ready.wait()
            said = in_mpi(self.host.transport.allgather_object, (self.calls(mine), stuck))
            everyone = [calls for calls, _ in said]
            queues = [[call.signature for call in calls] for calls in everyone]
            if all(not queue or has_joined(queue) for queue in queues):
                return
            members = self.host.members
            verdicts = match(queues, members, all(stuck for _, stuck in said))
            joined = [rank for rank, queue in zip(members, queues, strict=True) if has_joined(queue)]
            self.carry_out(verdicts, mine, [call for calls in everyone for call in calls], joined)
            nap = SHORTEST_NAP if verdicts else min(2 * nap, LONGEST_NAP)
            if not verdicts:
                time.sleep(nap)

    def calls(self, requests: Sequence[Request[Any]]) -> list[Call]:
        """The requests as other ranks see them."""
        return [request.call(self.lane.user) for request in requests]

    def carry_out(
        self, verdicts: Verdicts, mine: Sequence[Request[Any]], everyones: Sequence[Call], joined: Sequence[int]
    ) -> None:
        """Run or fail each request that has a verdict, errors first.

        Args:
            verdicts: By request key.
            mine: This rank's requests.
            everyones: All ranks' requests.
            joined: The ranks that have joined. They take part with zeros, if the operation allows it.
        """
        requests = {request.signature.key: request for request in mine}
        calls: dict[str, list[Call]] = {key: [] for key in verdicts}
        for call in everyones:
            calls.get(call.signature.key, []).append(call)
        errors = {key: error for key, error in verdicts.items() if error}
        if joined:
            errors |= refusals(calls, joined, errors)
        for key in sorted(verdicts, key=lambda key: key not in errors):
            if request := requests.get(key):
                with self.queue.changed.lock:
                    if self.queue.closed:
                        return
                    self.queue.requests.remove(request)
                if key in errors:
                    self.lane.settle(request, error=errors[key])
                else:
                    self.perform(request, calls[key], bool(joined))
            elif key not in errors and (stand_in := calls[key][0].stand_in):  # this rank has joined
                self.lane.stand_in(stand_in)

    def perform(self, request: Request[T], calls: Sequence[Call], some_joined: bool) -> None:
        """Do the work of a request that all ranks have called, or can stand in for."""
        request.agree(max(call.flag for call in calls))
        self.host.agree(not some_joined and len({call.count for call in calls}) == 1, some_joined)
        self.lane.execute(request)


def refusals(
    calls: dict[str, list[Call]], joined: Sequence[int], errors: dict[str, HvdliteError]
) -> dict[str, HvdliteError]:
    """Errors for the operations without a stand-in for joined ranks. calls: by request key. errors: other errors."""
    return {
        key: refusal(same[0].signature, joined)
        for key, same in calls.items()
        if key not in errors and same[0].stand_in is None
    }
