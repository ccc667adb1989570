"""Lanes on threads as ranks: order, matching by name, mismatches, leaving."""

from __future__ import annotations

import inspect
import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from hvdlite.algorithms import Place, allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.errors import HvdliteError, MismatchError, ShutdownError
from hvdlite.lanes.lane import Lane, Turn
from hvdlite.lanes.queue import Queue
from hvdlite.lanes.request import Changed, Handle, Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.handles import remember, synchronize
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks
from tests.unit.interrupts import raising_at

SIZES = (1, 2, 3, 4)


def on_lanes(size: int, function: Callable[[Lane], Any]) -> list[Any]:
    """Run function(lane) on `size` ranks at once."""
    return run_ranks(size, lambda transport: function(Lane(transport, Place(transport.size, False))))


def total(name: str, value: int = 1, length: int = 3) -> Request:
    """Sum `value` over the ranks."""
    array = np.full(length, value)

    def work(lane: Workplace) -> int:
        allreduce(lane.transport, lane.workspace, lane.place, array, Reduction())
        return int(array[0]) if length else 0

    return Request(Signature("allreduce", name, (("shape", (length,)),)), work)


@pytest.mark.parametrize("size", SIZES)
def test_requests_run_in_order(size: int) -> None:
    def rank_main(lane: Lane) -> None:
        done: list[int] = []

        def note(i: int, lane: Workplace) -> None:
            done.append(i)

        handles = [lane.submit(Request(Signature("note", str(i)), partial(note, i))) for i in range(50)]
        for handle in handles:
            handle.wait()
        assert done == list(range(50))

    on_lanes(size, rank_main)


def test_work_keeps_subnormal_numbers_in_threads_that_flush_them() -> None:
    """This holds in the caller's thread, and in the lane's thread, which inherits its settings.

    The caller's settings do not change.
    """
    least = np.full(4, 1e-40, np.float32)

    def doubled(lane: Workplace | None) -> bytes:
        return bytes((least + least).tobytes())

    kept = doubled(None)

    def rank_main(lane: Lane) -> None:
        assert torch.set_flush_denormal(True)
        try:
            for _ in range(2):
                assert doubled(None) == bytes(16)
                assert lane.run(Request(Signature("add", "a"), doubled)) == kept
                assert lane.submit(Request(Signature("add", "b"), doubled)).wait() == kept
            with pytest.raises(ZeroDivisionError):
                lane.run(Request(Signature("add", "c"), lambda lane: 1 / 0))
            assert doubled(None) == bytes(16)
        finally:
            torch.set_flush_denormal(False)

    on_lanes(2, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_a_synchronous_request_runs_in_its_callers_thread(size: int) -> None:
    """An idle lane has no other thread. The first asynchronous request starts one."""

    def rank_main(lane: Lane) -> None:
        who = Request(Signature("who", "a"), lambda lane: threading.current_thread())
        assert lane.run(who) is threading.current_thread() and lane.turn.thread is None
        other = Request(Signature("who", "b"), lambda lane: threading.current_thread())
        assert lane.submit(other).wait() is lane.turn.thread

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", [2, 3])
def test_an_inline_request_that_others_call_late_is_left_to_the_lanes_thread(size: int) -> None:
    def rank_main(lane: Lane) -> int:
        lane.run(total("before"))
        if lane.transport.rank:
            time.sleep(1.5)
        began = time.monotonic()
        handle = lane.begin(total("late"), 0.1 if lane.transport.rank == 0 else math.inf)
        if lane.transport.rank == 0:
            assert not handle.done and time.monotonic() - began < 1.2
        assert handle.wait() == size
        return lane.run(total("after", 2))

    assert on_lanes(size, rank_main) == [2 * size] * size


@pytest.mark.parametrize("size", SIZES)
def test_inline_on_one_rank_and_in_a_thread_on_another(size: int) -> None:
    def rank_main(lane: Lane) -> None:
        for i in range(20):
            request = total(str(i), lane.transport.rank)
            found = lane.run(request) if (i + lane.transport.rank) % 2 else lane.submit(request).wait()
            assert found == size * (size - 1) // 2

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_different_orders_are_matched_by_name(size: int) -> None:
    def rank_main(lane: Lane) -> None:
        rank, names = lane.transport.rank, list(range(12))
        for _ in range(5):
            random.Random(rank).shuffle(names)
            handles = {n: lane.submit(total(f"n{n}", n + rank)) for n in names}
            for n, handle in handles.items():
                assert handle.wait() == n * size + size * (size - 1) // 2

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES[1:])
def test_a_late_call_is_found(size: int) -> None:
    """Rank 0 calls B first and A much later; the other ranks call A first."""

    def rank_main(lane: Lane) -> None:
        if lane.transport.rank == 0:
            handles = [lane.submit(total("b"))]
            time.sleep(0.05)
            handles.append(lane.submit(total("a")))
        else:
            handles = [lane.submit(total("a")), lane.submit(total("b"))]
        assert [handle.wait() for handle in handles] == [size, size]
        assert lane.run(total("afterwards")) == size

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("inline", [True, False])
def test_a_mismatch_is_an_error_on_all_and_the_lane_goes_on(size: int, inline: bool) -> None:
    def rank_main(lane: Lane) -> str:
        for turn in range(3):
            request = total("loss", length=4 if lane.transport.rank == size - 1 else 3)
            with pytest.raises(MismatchError) as caught:
                lane.run(request) if inline else lane.submit(request).wait()
            assert lane.run(total(f"good {turn}")) == size
        assert not lane.queue.pending and not lane.queue.requests
        return str(caught.value)

    texts = set(on_lanes(size, rank_main))
    assert len(texts) == 1 and "loss" in (text := texts.pop()) and "(4,)" in text and "(3,)" in text


@pytest.mark.parametrize("size", SIZES)
def test_a_name_in_flight_is_refused(size: int) -> None:
    gate = threading.Event()

    def rank_main(lane: Lane) -> None:
        handle = lane.submit(Request(Signature("wait", "x"), lambda lane: gate.wait(10)))
        for call in (lane.submit, lane.run):
            with pytest.raises(ValueError, match="'x' is in flight already"):
                call(Request(Signature("wait", "x"), lambda lane: None))
        assert isinstance(lane.transport, ThreadTransport)
        lane.transport.board.gate.wait()  # all ranks have tried
        gate.set()
        assert handle.wait()
        assert lane.run(total("x")) == size
        lane.run(Request(Signature("wait", "x"), lambda lane: None))  # the name is free again

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_what_work_raises_is_its_handles_error(size: int) -> None:
    def rank_main(lane: Lane) -> None:
        def work(lane: Workplace) -> None:
            raise MismatchError("lost")

        handle = lane.submit(Request(Signature("bad", "x"), work))
        for _ in range(2):
            with pytest.raises(MismatchError, match="lost"):
                handle.wait()
        with pytest.raises(MismatchError, match="lost"):
            lane.run(Request(Signature("bad", "x"), work))
        assert lane.run(total("afterwards")) == size

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_leaving(size: int) -> None:
    """All submitted requests are done. Afterwards the lane reports that it is closed."""

    def rank_main(lane: Lane) -> None:
        handles = [lane.submit(total(str(i))) for i in range(10)]
        lane.leave()
        assert [handle.wait() for handle in handles] == [size] * 10
        lane.leave()
        for call in (lane.submit, lane.run):
            with pytest.raises(ShutdownError, match="init"):
                call(total("late"))

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("inline", [True, False])
def test_a_rank_that_leaves_early_is_named(size: int, inline: bool) -> None:
    def rank_main(lane: Lane) -> None:
        if lane.transport.rank != 0:
            for i in range(3):
                with pytest.raises(ShutdownError, match=r"ranks? 0.* shut down"):  # faster ranks may be in the next one
                    lane.run(total(f"n{i}")) if inline else lane.submit(total(f"n{i}")).wait()
        lane.leave()

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES[1:])
def test_what_a_leaving_rank_has_called_still_runs(size: int) -> None:
    """Rank 0 submits A and leaves at once. The other ranks disagree about B first, and then call A."""

    def rank_main(lane: Lane) -> None:
        if lane.transport.rank == 0:
            handle = lane.submit(total("a"))
        else:
            with pytest.raises(ShutdownError, match="'b': rank 0"):
                lane.run(total("b"))
            time.sleep(0.02)
            handle = lane.submit(total("a"))
        lane.leave()
        assert handle.wait() == size

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_flags_are_the_largest_of_all_ranks(size: int) -> None:
    def rank_main(lane: Lane) -> None:
        request = Request(Signature("flag", "x"), lambda lane: None, flag=lane.transport.rank)
        lane.run(request)
        assert request.flag == size - 1 or size == 1

    on_lanes(size, rank_main)


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("counts", [[7, 7, 7, 7], [0, 0, 0, 0], [0, 1, 0, 0], [-1, -2, -3, -4], [2**61, 2**61, 1, 2]])
@pytest.mark.parametrize("in_rounds", [False, True])
def test_whether_counts_are_alike_is_the_same_everywhere(size: int, counts: list[int], in_rounds: bool) -> None:
    """The ranks know it from the roll call, and also if they call in different orders."""

    def rank_main(lane: Lane) -> None:
        rank = lane.transport.rank
        found: dict[str, bool] = {}

        def ask(name: str) -> Request:
            return Request(
                Signature("ask", name), lambda lane: found.update({name: lane.equal_counts}), count=counts[rank]
            )

        names = ["a", "b"] if rank == 0 or not in_rounds else ["b", "a"]
        for handle in [lane.submit(ask(name)) for name in names]:
            handle.wait()
        assert found == dict.fromkeys("ab", len(set(counts[:size])) == 1)

    on_lanes(size, rank_main)


def test_the_lane_hurries_while_somebody_waits() -> None:
    """A lane naps between tests of a roll call only while the user's thread computes."""

    def rank_main(lane: Lane) -> list[bool]:
        seen: list[bool] = []
        waiting = threading.Event()

        def look(at: Workplace) -> None:
            waiting.wait(10)
            deadline = time.monotonic() + 5 * (lane.transport.rank == 0)
            while not lane.hurried() and time.monotonic() < deadline:
                time.sleep(0.001)
            seen.append(lane.hurried())

        first, second = lane.submit(Request(Signature("look", "1"), look)), lane.submit(total("2"))
        seen.append(lane.hurried())
        waiting.set()
        if lane.transport.rank == 0:
            second.wait()
        while not (first.done and second.done):
            time.sleep(0.001)
        seen.append(lane.hurried())
        return [*seen, lane.run(Request(Signature("look", "3"), lambda at: lane.hurried()))]

    assert on_lanes(2, rank_main) == [[False, True, False, True], [False, False, False, True]]


def test_requests_from_many_threads() -> None:
    """Each rank has eight threads, each with its own names."""

    def rank_main(lane: Lane) -> None:
        results: list[int] = []

        def call(number: int) -> None:
            results.extend(lane.run(total(f"{number}.{i}")) for i in range(5))

        threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert results == [2] * 40

    on_lanes(2, rank_main)


def test_an_interrupted_wait_closes_the_lane() -> None:
    """Ctrl-C while waiting for other ranks is raised, and later calls report that this process has left."""

    class Interrupted(ThreadTransport):
        def put_up(self, values: Any) -> Any:
            raise KeyboardInterrupt

    def rank_main(transport: ThreadTransport) -> None:
        lane = Lane(Interrupted(transport.board, transport.rank), Place(2, False))
        with pytest.raises(KeyboardInterrupt):
            lane.run(total("x"))
        with pytest.raises(HvdliteError, match="interrupted"):
            lane.run(total("y"))

    run_ranks(2, rank_main)


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_digested_fails_its_own_call(size: int) -> None:
    def rank_main(lane: Lane) -> None:
        for call in (lane.run, lane.submit):
            with pytest.raises(TypeError, match="unhashable"):
                call(Request(Signature("test", "x", (("list", [1]),)), lambda lane: None))
            assert lane.run(total("x")) == size

    on_lanes(size, rank_main)


def test_a_call_in_the_middle_of_another_is_refused() -> None:
    """From a signal handler, for example. Each call would wait for the other."""

    def rank_main(lane: Lane) -> None:
        with pytest.raises(HvdliteError, match="in the middle of another call"):
            lane.run(Request(Signature("outer", "x"), lambda at: lane.run(total("inner"))))
        assert lane.run(Request(Signature("outer", "y"), lambda at: lane.submit(total("queued")))).wait() == 2
        with pytest.raises(HvdliteError, match="in the middle of another call"):
            lane.run(Request(Signature("outer", "z"), lambda at: lane.leave()))
        assert lane.run(total("after")) == 2

    on_lanes(2, rank_main)


def test_a_thread_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that needs the thread fails. A later call runs, once there is room for a thread."""
    start, lane = threading.Thread.start, Lane(alone(), Place(1, False))

    def full(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", full)
    with pytest.raises(RuntimeError, match="new thread"):
        lane.submit(total("x"))
    monkeypatch.setattr(threading.Thread, "start", start)
    assert not lane.queue.pending and not lane.queue.requests
    assert [lane.submit(total(name)).wait() for name in "xy"] == [1, 1]


@pytest.mark.parametrize("waits", [False, True])
def test_infinities_are_no_errors(waits: bool) -> None:
    """That holds even if the user has NumPy raise on them."""

    def rank_main(lane: Lane) -> None:
        array = np.array([np.inf if lane.transport.rank else -np.inf, 1])

        def work(lane: Workplace) -> None:
            allreduce(lane.transport, lane.workspace, lane.place, array, Reduction())

        request = Request(Signature("allreduce", "x"), work)
        with np.errstate(all="raise"):
            lane.run(request) if waits else lane.submit(request).wait()
        assert np.isnan(array[0]) and array[1] == 2

    on_lanes(2, rank_main)


def test_a_handle_whose_wait_was_interrupted_can_be_awaited_again() -> None:
    changed, waits = Changed(), iter([True, False])

    class Interrupted(Handle):
        def wait(self, seconds: float | None = None) -> Any:
            if next(waits):
                raise KeyboardInterrupt
            with changed:
                self.finish("result")
            return super().wait()

    number = remember(Interrupted(changed))
    with pytest.raises(KeyboardInterrupt):
        synchronize(number)
    assert synchronize(number) == "result" and synchronize(number) is None


def test_a_handle_is_done_once_it_has_a_result() -> None:
    changed = Changed()
    handle: Handle[str] = Handle(changed)
    assert not handle.done
    with changed:
        handle.finish("result")
    assert handle.done and handle.wait() == "result"


@pytest.mark.parametrize("waits", [True, False])
def test_what_goes_wrong_while_ranks_agree_fails_all_that_is_pending(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the caller's thread, and in the lane's, where no caller sees the error: no call waits for ever."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def rank_main(lane: Lane) -> None:
        lane.attempt = lambda request, until=math.inf: bool(1 / 0)
        with pytest.raises((ZeroDivisionError, HvdliteError)) as caught:
            lane.run(total("x")) if waits else lane.submit(total("x")).wait()
        assert waits or "allreduce 'x' was interrupted (ZeroDivisionError: division by zero)" in str(caught.value)
        for _ in range(3):
            with pytest.raises(HvdliteError, match="can no longer communicate") as told:
                lane.run(total("y"))
            assert len(told.traceback) < 6  # results of earlier calls are not kept alive
        if lane.turn.thread is not None:
            lane.turn.thread.join(5)  # before the old hook is back

    on_lanes(2, rank_main)


@pytest.mark.parametrize("method", [Lane.begin, Queue.admit, Turn.lend, Lane.run_here])
def test_an_exception_of_a_signals_handler_at_any_line(method: Any) -> None:
    """At each line of these methods: either the call has been made or it has not, and the next call of this name works."""
    first, reached = method.__code__.co_firstlineno, 0
    for line in range(first + 1, first + len(inspect.getsource(method).splitlines())):
        lane = Lane(alone(), Place(1, False))
        with raising_at(method, line):
            try:
                lane.run(total("x"))
            except KeyboardInterrupt:
                reached += 1
        found: list[Any] = []
        caller = threading.Thread(target=lambda: found.append(lane.run(total("y"))))
        caller.start()
        caller.join(5)
        assert found == [1] and not lane.queue.pending and not lane.turn.busy, (method, line)
        assert lane.run(total("x")) == 1, (method, line)
    assert reached >= (2 if method is Turn.lend else 6)


def test_a_closed_lanes_thread_ends_and_its_reason_stays() -> None:
    lane = Lane(alone(), Place(1, False))
    lane.submit(total("x")).wait()
    lane.close(HvdliteError("first"))
    lane.close(HvdliteError("second"))
    assert lane.turn.thread is not None
    lane.turn.thread.join(5)
    assert not lane.turn.thread.is_alive() and str(lane.closed) == "first"


def test_who_leaves_releases_every_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane frees its own communicator and those of two hosts: MPIs have 2,000."""
    closed: list[ThreadTransport] = []
    monkeypatch.setattr(ThreadTransport, "close", lambda self: closed.append(self))

    def rank_main(transport: ThreadTransport) -> bool:
        lane = Lane(transport, Place(3, True, "auto", ((0, 1), (2,))))
        levels = lane.host.workspace.levels(transport, lane.place.hosts)
        lane.leave()
        return all(each is None or each in closed for each in (transport, levels.local, levels.cross))

    assert run_ranks(3, rank_main) == [True] * 3


def test_who_lends_is_known_before_it_is_said() -> None:
    """Another thread looks at both without the lock.

    Otherwise it would take itself, an earlier lender, for this one.
    """

    class Watched(Turn):
        def __setattr__(self, name: str, value: Any) -> None:
            if name == "lent" and value:
                assert self.lender == threading.get_ident()
            super().__setattr__(name, value)

    lane = Lane(alone(), Place(1, False))
    lane.turn = Watched()
    assert lane.run(total("x")) == 1 and lane.turn.lender
