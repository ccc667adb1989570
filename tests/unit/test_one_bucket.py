"""Rounds of one bucket on an idle lane: they run in the thread that waits for them, and end in any case."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from hvdlite.algorithms import Place
from hvdlite.algorithms.reduction import Reduction
from hvdlite.errors import HvdliteError, MismatchError, VoidError
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.plan import Spec, plan
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Seat
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import JOIN, Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.unit.interrupts import raising_at

SPECS = [Spec(f"p{i}", (7, i + 1), "float32") for i in range(3)]


def tag(number: int) -> Round:
    return Round("round {}", (number,))


def on_reducers(size: int, function: Callable[[Reducer, int], Any], bucket_bytes: int = 1 << 20) -> list[Any]:
    """Run function(reducer, rank) on `size` ranks at once, after a first round: sums."""

    def rank_main(transport: ThreadTransport) -> Any:
        lane = Lane(transport, Place(transport.size, False))
        reducer = Reducer(lane, plan(SPECS, bucket_bytes, bucket_bytes), Reduction(), "r", Departure(False))
        put(reducer, 1.0)
        finish(reducer, 0)
        result = function(reducer, transport.rank)
        with contextlib.suppress(HvdliteError):
            lane.leave()
        return result

    return run_ranks(size, rank_main)


def put(reducer: Reducer, value: float) -> None:
    for view in reducer.views:
        view[...] = value
    reducer.mark_at_end(range(len(SPECS)), {})


def finish(reducer: Reducer, number: int) -> list[Use]:
    return reducer.finish_round(lambda index: Use.DENSE, tag(number))


def is_idle(lane: Lane) -> bool:
    return not (lane.turn.busy or lane.turn.lent or lane.queue.requests or lane.queue.pending)


@pytest.mark.parametrize("size", [2, 3])
def test_rounds_run_in_the_thread_that_waits(size: int) -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        for number in range(1, 12):
            put(reducer, number)
            assert finish(reducer, number) is reducer.all_dense
            assert not reducer.progress.begun and not any(reducer.progress.marked)
            assert all((view == size * number).all() for view in reducer.views) and is_idle(reducer.lane)
        assert reducer.lane.turn.thread is None
        assert reducer.lane.queue.calls == 13 and reducer.lane.queue.callers.keys() >= {
            threading.get_ident()
        }  # together with the plan

    on_reducers(size, rank_main)


def test_rounds_are_the_same_whatever_else_the_lane_does() -> None:
    class Observer:
        def queued(self, seat: Seat, request: Request) -> None:
            called.append(request.key)

        def agreed(self, seat: Seat, request: Request) -> None: ...

        def done(self, seat: Seat, request: Request) -> None: ...

        def wait_begins(self) -> None: ...

        def wait_ends(self) -> None: ...

    def observed(reducer: Reducer) -> None:
        reducer.lane.queue.observers = [Observer()]

    def in_use(reducer: Reducer) -> None:
        reducer.lane.submit(Request(Signature("note", "x"), lambda lane: None))

    def pending(reducer: Reducer) -> None:
        reducer.requests[0].handle.done = False

    called: list[str] = []
    for change in observed, in_use, pending, lambda reducer: reducer.requests.clear():

        def rank_main(reducer: Reducer, rank: int) -> None:
            change(reducer)
            put(reducer, 2.0)
            assert finish(reducer, 1) is reducer.all_dense and all((view == 4).all() for view in reducer.views)

        on_reducers(2, rank_main)
    assert [key for key in called if "gradients" in key] == ["gradients 'r bucket 0'"] * 2


def test_what_another_rank_lacks_is_found_out() -> None:
    """That rank reports it in the roll call."""

    def rank_main(reducer: Reducer, rank: int) -> None:
        put(reducer, 3.0)
        if rank == 1:
            reducer.progress.marked[1] = 0
        uses = reducer.finish_round(lambda index: Use.SPARSE, tag(1))
        assert uses == [Use.DENSE, Use.SPARSE, Use.DENSE] and (reducer.views[0] == 6).all()
        put(reducer, 1.0)
        assert finish(reducer, 2) is reducer.all_dense and (reducer.views[0] == 2).all()

    on_reducers(2, rank_main)


def test_a_round_that_another_rank_has_voided_has_no_results() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        put(reducer, 3.0)
        if rank == 0:
            with pytest.raises(VoidError, match="rank 1"):
                finish(reducer, 1)
            assert reducer.abandon_round(tag(1))
        else:
            reducer.void_round(tag(1))
            assert reducer.forget_round()
        put(reducer, 1.0)
        assert finish(reducer, 2) is reducer.all_dense and (reducer.views[0] == 2).all()

    on_reducers(2, rank_main)


def test_a_mismatch_is_told_on_all_ranks_and_training_goes_on() -> None:
    def rank_main(reducer: Reducer, rank: int) -> str:
        put(reducer, 3.0)
        with pytest.raises(MismatchError) as told:
            if rank == 0:
                finish(reducer, 1)
            else:
                reducer.lane.run(Request(Signature("plan", "r bucket 0"), lambda lane: None))
        reducer.abandon_round(tag(1))
        reducer.begin_round()
        put(reducer, 1.0)
        finish(reducer, 2)
        put(reducer, 2.0)
        finish(reducer, 3)
        assert (reducer.views[0] == 4).all() and is_idle(reducer.lane)
        return str(told.value)

    first, second = on_reducers(2, rank_main)
    assert first == second and "kind differs" in first


def test_a_rank_that_has_joined_takes_part_with_zeros() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        if rank == 0:
            put(reducer, 3.0)
            finish(reducer, 1)
            assert all((view == 3).all() for view in reducer.views)
        reducer.lane.run(Request(JOIN, lambda lane: None))
        put(reducer, 1.0)
        finish(reducer, 2)
        assert (reducer.views[0] == 2).all()

    on_reducers(2, rank_main)


def test_what_the_work_raises_is_raised_and_breaks_the_lane() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        put(reducer, 3.0)
        reducer.requests[0].work = lambda lane: bool(1 / 0)
        with pytest.raises(ZeroDivisionError):
            finish(reducer, 1)
        with pytest.raises(HvdliteError, match="failed in the middle on this rank"):
            reducer.lane.run(Request(Signature("note", "x"), lambda lane: None))

    on_reducers(2, rank_main)


def test_a_call_in_the_middle_of_one_is_refused() -> None:
    """A signal's handler may make such a call."""

    def rank_main(reducer: Reducer, rank: int) -> None:
        ran: list[bool] = []

        lane = reducer.lane

        def work(at: Workplace) -> bool:
            with pytest.raises(HvdliteError, match="in the middle of another call"):
                lane.run(Request(Signature("note", "x"), lambda lane: None))
            assert lane.turn.lent and lane.turn.busy
            ran.append(True)
            return True

        reducer.requests[0].work = work
        put(reducer, 3.0)
        finish(reducer, 1)
        assert ran and is_idle(reducer.lane)

    on_reducers(2, rank_main)


@pytest.mark.parametrize("function", [Reducer.finish_round, Reducer.send_rest, Reducer.request])
def test_an_exception_of_a_signals_handler_at_any_line(function: Callable[..., Any]) -> None:
    """After Ctrl-C the next round runs, or the lane is closed and reports it. No thread holds the lane in the end."""
    (lines, first), reached, closed = inspect.getsourcelines(function), 0, 0
    for line in (first + i for i in range(1, len(lines)) if lines[i].strip() != "try:"):  # no handler runs there

        def rank_main(reducer: Reducer, rank: int) -> tuple[bool, bool]:
            lane, raised = reducer.lane, False
            put(reducer, 3.0)
            with raising_at(function, line):
                try:
                    finish(reducer, 1)
                except KeyboardInterrupt:
                    raised = True
            assert not lane.turn.lent and not lane.turn.busy and not lane.queue.pending, line
            if lane.closed is None:
                reducer.abandon_round(tag(1))
                reducer.begin_round()
                put(reducer, 2.0)
                finish(reducer, 2)
                assert (reducer.views[0] == 2).all() and is_idle(lane), line
                found: list[int] = []
                work = Request(Signature("note", "x"), lambda lane: 1)
                other = threading.Thread(target=lambda: found.append(lane.run(work)))
                other.start()
                other.join(5)
                assert found == [1], line
            return raised, lane.closed is not None

        ((raised, broken),) = on_reducers(1, rank_main)
        reached, closed = reached + raised, closed + broken
    assert reached >= 3 and not closed
