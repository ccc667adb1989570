"""The reducer on threads as ranks: when buckets leave, and how rounds end that fail or lack ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.algorithms import Place
from hvdlite.algorithms.reduction import Reduction
from hvdlite.errors import VoidError
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.overlap_trial import EACH, WARM_UP
from hvdlite.gradients.plan import Spec, plan
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Seat
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import JOIN, Round
from hvdlite.transports.threads import ThreadTransport, run_ranks

WORDS = "part {}, round {}"
FIRST, SECOND = Round(WORDS, (1, 0)), Round(WORDS, (2, 0))
SPECS = [Spec(f"p{i}", (40, i + 1), "float32") for i in range(6)]


def on_reducers(
    size: int, function: Callable[[Reducer], Any], overlap: bool | None, members: Sequence[int] | None = None
) -> list[Any]:
    """Run function(reducer) on `size` ranks at once: several buckets, sums."""

    def rank_main(transport: ThreadTransport) -> Any:
        lane = Lane(transport, Place(transport.size, False), members)
        result = function(Reducer(lane, plan(SPECS, 2048, 1024), Reduction(), "r", Departure(overlap)))
        lane.leave()
        return result

    return run_ranks(size, rank_main)


def mark_all(reducer: Reducer, value: float, tag: Round) -> None:
    for i in reversed(range(len(SPECS))):
        reducer.views[i][...] = value
        reducer.mark_ready([i], tag)


def finish(reducer: Reducer, tag: Round) -> None:
    reducer.finish_round(lambda index: Use.DENSE, tag)


def settle(reducer: Reducer) -> None:
    """Wait until all sent buckets are done and the lane is idle."""
    for _, handle in reducer.progress.sent:
        handle.wait()
    while reducer.lane.turn.busy:
        time.sleep(0.001)


def test_a_backward_that_raises_at_its_very_end_is_void_on_all_ranks() -> None:
    """All gradients were there, so all buckets were full. The last bucket has not left, and its flag names the rank."""

    def rank_main(reducer: Reducer) -> str:
        mark_all(reducer, 1.0, FIRST)
        left, text = len(reducer.progress.sent), ""
        if reducer.lane.transport.rank == 1:
            assert reducer.abandon_round(FIRST)
        else:
            try:
                finish(reducer, FIRST)
            except VoidError as error:
                text = str(error)
            reducer.abandon_round(SECOND)
        mark_all(reducer, 1.0, SECOND)
        finish(reducer, SECOND)
        assert all((view == 2).all() for view in reducer.views)
        assert left == len(reducer.plan.buckets) - 1
        return text

    told, _ = on_reducers(2, rank_main, overlap=True, members=(3, 5))
    assert "a backward of rank 5 raised" in told


def test_the_last_bucket_is_reduced_by_the_thread_that_waits_for_it() -> None:
    """If all earlier buckets are done, no other thread has to wake up."""

    class Threads:
        def __init__(self) -> None:
            self.of: dict[str, int] = {}

        def agreed(self, seat: Seat, request: Request) -> None:
            self.of[request.signature.name] = threading.get_ident()

        def queued(self, seat: Seat, request: Request) -> None: ...

        def done(self, seat: Seat, request: Request) -> None: ...

        def wait_begins(self) -> None: ...

        def wait_ends(self) -> None: ...

    def rank_main(reducer: Reducer) -> None:
        reducer.lane.queue.observers = (threads := Threads(),)
        mark_all(reducer, 1.0, FIRST)
        settle(reducer)
        finish(reducer, FIRST)
        own = [threads.of[f"r bucket {i}"] == threading.get_ident() for i in range(len(reducer.buckets))]
        assert own == [False] * (len(own) - 1) + [True]

    on_reducers(2, rank_main, overlap=True)


def test_a_request_is_not_used_again_before_it_is_done() -> None:
    """Ctrl-C may have ended the wait for it."""

    def rank_main(reducer: Reducer) -> None:
        mark_all(reducer, 1.0, FIRST)
        finish(reducer, FIRST)
        before = reducer.requests[0]
        assert reducer.request(0, SECOND) is before
        before.handle.done = False
        assert reducer.request(0, SECOND) is not before
        before = reducer.request(0, SECOND)  # it has not been queued, as if the lane had refused it
        mark_all(reducer, 2.0, SECOND)
        finish(reducer, SECOND)
        assert reducer.requests[0] is not before and (reducer.views[0] == 2.0).all()

    on_reducers(1, rank_main, overlap=False)


def test_who_voids_a_round_does_not_wait_for_the_others() -> None:
    """The other ranks may be in another optimizer's round, which this rank is about to make void too."""
    voided = threading.Event()

    def rank_main(reducer: Reducer) -> bool:
        mark_all(reducer, 1.0, FIRST)
        settle(reducer)
        others_went_on = reducer.lane.transport.rank == 0 or voided.wait(5)
        reducer.void_round(FIRST)
        voided.set()
        reducer.forget_round()
        return others_went_on

    assert all(on_reducers(2, rank_main, overlap=True))


def test_marks_of_an_abandoned_round_are_forgotten() -> None:
    """Otherwise a gradient missing in the next round would be taken from this round."""

    def rank_main(reducer: Reducer) -> None:
        for mark in (lambda: reducer.mark_at_end(range(len(SPECS)), {}), lambda: reducer.mark_ready([2], FIRST)):
            mark()
            assert not reducer.abandon_round(FIRST), "none was reduced"
            assert not any(reducer.progress.marked)

    on_reducers(2, rank_main, overlap=False)


def test_an_abandoned_round_is_none_of_the_trials() -> None:
    def rank_main(reducer: Reducer) -> None:
        mark_all(reducer, 1.0, FIRST)
        reducer.abandon_round(FIRST)
        assert (
            reducer.departure.trial is not None and reducer.departure.trial.began is None
        )  # otherwise it would count until the next round ends

    on_reducers(2, rank_main, overlap=None)


def test_rounds_without_ranks_that_have_joined_are_none_of_the_trials() -> None:
    """So all ranks' trials end with the same round, in which the ranks agree."""

    def rank_main(reducer: Reducer) -> list[bool]:
        ways = []
        for step in range(3 * reducer.lane.transport.rank):
            mark_all(reducer, 1.0, Round(WORDS, (3, step)))
            finish(reducer, Round(WORDS, (3, step)))
        reducer.lane.run(Request(JOIN, lambda lane: None))
        for step in range(WARM_UP + 2 * EACH):
            ways.append(reducer.overlap)
            mark_all(reducer, 1.0, Round(WORDS, (4, step)))
            finish(reducer, Round(WORDS, (4, step)))
        assert reducer.departure.trial is None
        return ways

    one, other = on_reducers(2, rank_main, overlap=None)
    assert one == other


def test_the_order_learned_is_rank_0s() -> None:
    """All gradients that rank 0 did not have come after it."""

    def rank_main(transport: ThreadTransport) -> list[int] | None:
        lane = Lane(transport, Place(transport.size, False))
        reducer = Reducer(lane, plan(SPECS, 2048, 1024), Reduction(), "r", Departure(True, learn=True))
        for i in ((3, 0, 4, 1), (5, 4, 3, 2, 1, 0))[transport.rank]:
            reducer.mark_ready([i], FIRST)
        finish(reducer, FIRST)
        lane.leave()
        return reducer.departure.order

    assert run_ranks(2, rank_main) == [[3, 0, 4, 1, 5, 2]] * 2
