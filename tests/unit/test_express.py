"""A usual round in few functions: the same as by the longer way, which it leaves all else to."""

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
from hvdlite.gradients.plan import Spec, plan
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes.express import finished, run_again
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import JOIN, Round, Signature
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.unit.interrupts import raising_at

SPECS = [Spec(f"p{i}", (7, i + 1), "float32") for i in range(3)]


def tag(number: int) -> Round:
    return Round("round {}", (number,))


def on_reducers(size: int, function: Callable[[Reducer, int], Any], bucket_bytes: int = 1 << 20) -> list[Any]:
    """function(reducer, rank) on `size` ranks at once, behind a first round: sums."""

    def rank_main(transport: ThreadTransport) -> Any:
        lane = Lane(transport, Place(transport.size, False))
        reducer = Reducer(lane, plan(SPECS, bucket_bytes, bucket_bytes), Reduction(), "r", False)
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
    reducer.mark_all({})


def finish(reducer: Reducer, number: int) -> list[Use]:
    return reducer.finish_round(lambda index: Use.DENSE, tag(number))


def is_idle(lane: Lane) -> bool:
    return not (lane.busy or lane.lent or lane.queue or lane.pending)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_may_go_either_way(size: int) -> None:
    """Or the same one, in turns; also where one comes late."""

    def rank_main(reducer: Reducer, rank: int) -> None:
        for number in range(1, 12):
            put(reducer, number)
            if number % 3 and number % (rank + 2):
                assert finished(reducer, tag(number)) and not reducer.begun and not any(reducer.marked)
            else:
                finish(reducer, number)
            assert all((view == size * number).all() for view in reducer.views) and is_idle(reducer.lane)
        assert reducer.lane.calls == 13 and reducer.lane.callers.keys() >= {threading.get_ident()}  # with the plan

    on_reducers(size, rank_main)


def test_what_is_not_as_usual_is_not_begun() -> None:
    class Observer:
        def queued(self, lane: Lane, request: Request) -> None:
            called.append(request.key)

        def agreed(self, lane: Lane, request: Request) -> None: ...

        def done(self, lane: Lane, request: Request) -> None: ...

    def observed(reducer: Reducer) -> None:
        reducer.lane.observers = [Observer()]

    def in_use(reducer: Reducer) -> None:
        reducer.lane.submit(Request(Signature("note", "x"), lambda lane: seen.wait(5)))

    def pending(reducer: Reducer) -> None:
        reducer.requests[0].handle.done = False

    called: list[str] = []
    for change in observed, in_use, pending, lambda reducer: reducer.requests.clear():
        seen, both = threading.Event(), threading.Barrier(2)

        def rank_main(reducer: Reducer, rank: int) -> None:
            change(reducer)  # noqa: B023
            put(reducer, 2.0)
            calls = reducer.lane.calls
            assert not finished(reducer, tag(1)) and not reducer.sent and reducer.lane.calls == calls
            both.wait(5)  # noqa: B023
            seen.set()  # noqa: B023
            assert finish(reducer, 1) is reducer.all_dense and all((view == 4).all() for view in reducer.views)

        on_reducers(2, rank_main)
    assert [key for key in called if "gradients" in key] == ["gradients 'r bucket 0'"] * 2


def test_several_buckets_take_the_longer_way() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        assert len(reducer.buckets) > 1
        put(reducer, 2.0)
        assert not finished(reducer, tag(1)) and not reducer.sent
        finish(reducer, 1)
        assert all((view == 4).all() for view in reducer.views)

    on_reducers(2, rank_main, bucket_bytes=64)


def test_what_another_rank_lacks_is_found_out() -> None:
    """It says so in the roll call."""

    def rank_main(reducer: Reducer, rank: int) -> None:
        put(reducer, 3.0)
        if rank == 0:
            assert not finished(reducer, tag(1)) and len(reducer.sent) == 1
        else:
            reducer.marked[1] = 0
        uses = reducer.finish_round(lambda index: Use.SPARSE, tag(1))
        assert uses == [Use.DENSE, Use.SPARSE, Use.DENSE] and (reducer.views[0] == 6).all()
        put(reducer, 1.0)
        assert finished(reducer, tag(2)) and (reducer.views[0] == 2).all()

    on_reducers(2, rank_main)


def test_a_round_that_another_rank_has_voided_has_no_results() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        put(reducer, 3.0)
        if rank == 0:
            assert not finished(reducer, tag(1))
            with pytest.raises(VoidError, match="rank 1"):
                finish(reducer, 1)
            assert reducer.abandon_round(tag(1))
        else:
            reducer.void_round(tag(1))
            assert reducer.forget_round()
        put(reducer, 1.0)
        assert finished(reducer, tag(2)) and (reducer.views[0] == 2).all()

    on_reducers(2, rank_main)


def test_a_mismatch_is_told_on_all_ranks_and_training_goes_on() -> None:
    def rank_main(reducer: Reducer, rank: int) -> str:
        put(reducer, 3.0)
        with pytest.raises(MismatchError) as told:
            if rank == 0:
                assert not finished(reducer, tag(1)) and not reducer.sent[0][1].done
                finish(reducer, 1)
            else:
                reducer.lane.run(Request(Signature("plan", "r bucket 0"), lambda lane: None))
        reducer.abandon_round(tag(1))
        reducer.begin_round()
        put(reducer, 1.0)
        finished(reducer, tag(2)) or finish(reducer, 2)
        put(reducer, 2.0)
        assert finished(reducer, tag(3)) and (reducer.views[0] == 4).all() and is_idle(reducer.lane)
        return str(told.value)

    first, second = on_reducers(2, rank_main)
    assert first == second and "kind differs" in first


def test_a_rank_that_has_joined_takes_part_with_zeros() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        if rank == 0:
            put(reducer, 3.0)
            assert not finished(reducer, tag(1))
            finish(reducer, 1)
            assert all((view == 3).all() for view in reducer.views)
        reducer.lane.run(Request(JOIN, lambda lane: None))
        put(reducer, 1.0)
        finished(reducer, tag(2)) or finish(reducer, 2)
        assert (reducer.views[0] == 2).all()

    on_reducers(2, rank_main)


def test_what_the_work_raises_is_raised_and_breaks_the_lane() -> None:
    def rank_main(reducer: Reducer, rank: int) -> None:
        put(reducer, 3.0)
        reducer.requests[0].work = lambda lane: 1 / 0
        assert not finished(reducer, tag(1))
        with pytest.raises(ZeroDivisionError):
            finish(reducer, 1)
        with pytest.raises(HvdliteError, match="failed in the middle on this rank"):
            reducer.lane.run(Request(Signature("note", "x"), lambda lane: None))

    on_reducers(2, rank_main)


def test_a_call_in_the_middle_of_one_is_refused() -> None:
    """By a signal's handler, say."""

    def rank_main(reducer: Reducer, rank: int) -> None:
        request, refused = reducer.requests[0], []

        def work(lane: Lane) -> bool:
            with pytest.raises(HvdliteError, match="in the middle of another call"):
                lane.run(Request(Signature("note", "x"), lambda lane: None))
            refused.append(run_again(lane, request, tag(9)))
            assert lane.lent and lane.busy
            return True

        request.work = work
        put(reducer, 3.0)
        assert finished(reducer, tag(1)) and refused == [False] and is_idle(reducer.lane)

    on_reducers(2, rank_main)


@pytest.mark.parametrize("function", [finished, run_again])
def test_an_exception_of_a_signals_handler_at_any_line(function: Callable[..., Any]) -> None:
    """Ctrl-C: the next round runs, or the lane has been closed, and says so; it is nobody's in the end."""
    (lines, first), reached, closed = inspect.getsourcelines(function), 0, 0
    for line in (first + i for i in range(1, len(lines)) if lines[i].strip() != "try:"):  # where no handler runs

        def rank_main(reducer: Reducer, rank: int) -> tuple[bool, bool]:
            lane, raised = reducer.lane, False
            put(reducer, 3.0)
            with raising_at(function, line):  # noqa: B023
                try:
                    finished(reducer, tag(1)) or finish(reducer, 1)
                except KeyboardInterrupt:
                    raised = True
            assert not lane.lent and not lane.busy and not lane.pending, line  # noqa: B023
            if lane.closed is None:
                reducer.abandon_round(tag(1))
                reducer.begin_round()
                put(reducer, 2.0)
                finished(reducer, tag(2)) or finish(reducer, 2)
                assert (reducer.views[0] == 2).all() and is_idle(lane), line  # noqa: B023
                found: list[int] = []
                work = Request(Signature("note", "x"), lambda lane: 1)
                other = threading.Thread(target=lambda: found.append(lane.run(work)))
                other.start()
                other.join(5)
                assert found == [1], line  # noqa: B023
            return raised, lane.closed is not None

        ((raised, broken),) = on_reducers(1, rank_main)
        reached, closed = reached + raised, closed + broken
    assert reached > 5
    assert (closed > 0) == (function is run_again)
