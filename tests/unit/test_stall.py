"""The stall watch on threads as ranks, with lanes that do nothing; and its pure parts: diagnosis, positions."""

from __future__ import annotations

import _thread
import contextlib
import dataclasses
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from hvdlite.algorithms import Place
from hvdlite.config import StallLimits
from hvdlite.errors import StallError
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Changed, Handle, Request
from hvdlite.lanes.signature import JOIN, Signature
from hvdlite.observers import diagnosis, positions
from hvdlite.observers.board import MOST_WAITS, Board
from hvdlite.observers.diagnosis import Report, Stall, Wait, deadlocked, diagnose
from hvdlite.observers.inquiry import Inquiry
from hvdlite.observers.patience import Limits
from hvdlite.observers.stall import StallWatch, watch
from hvdlite.transports.threads import ThreadTransport, alone, run_ranks

EVERYONE = (0, 1, 2)
CHECK = 0.2
Told = tuple[int, list[Report | None], list[Stall]]


def wait(
    key: str, seconds: float, lane: str = "eager", members: tuple[int, ...] = EVERYONE, working: float = 0.0
) -> Wait:
    return Wait(lane, members, key, seconds, working)


# Diagnosis


def test_who_waits_for_whom() -> None:
    reports = [Report("a.py:1", (wait("loss", 70),)), Report("b.py:2"), Report("a.py:1", (wait("loss", 65),))]
    (stall,) = diagnose(reports, 60)
    assert stall == Stall("loss", (0, 2), (1,), 70, "loss", "eager", EVERYONE)
    assert diagnosis.summary(stall) == "loss: ranks 0, 2 have waited 70 s for rank 1"
    assert diagnosis.rows(reports, [stall]) == [("0, 2", "loss", "rank 1, 70 s", "a.py:1"), ("1", "", "", "b.py:2")]
    assert "Rank 1 is at b.py:2" in diagnosis.letter(reports, [stall]) and "batches" not in diagnosis.letter(
        reports, [stall]
    )
    assert "It is collective: every rank must call it." in diagnosis.letter(reports, [stall])
    of_gradients = dataclasses.replace(stall, title="gradients of DistributedOptimizer(SGD)")
    assert "batches" in diagnosis.letter(reports, [of_gradients]) and "collective" not in diagnosis.letter(
        reports, [of_gradients]
    )


def test_a_short_wait_is_no_stall() -> None:
    assert diagnose([Report("a", (wait("loss", 59),)), Report("b"), Report("c")], 60) == []


def test_a_rank_without_an_answer_is_waited_for() -> None:
    reports = [Report("a", (wait("loss", 61),)), None, Report("c", (wait("loss", 61),))]
    (stall,) = diagnose(reports, 60)
    assert stall.lacking == (1,) and "Rank 1: no answer" in diagnosis.letter(reports, [stall])
    assert "collective" not in diagnosis.letter(reports, [stall])  # it might have called it if it had not been stopped


def test_a_table_names_what_the_user_called() -> None:
    called = dataclasses.replace(wait("new lane 'optimizer.2 (2)'", 70), title="hvd.load_model('best.keras')")
    (stall,) = diagnose([Report("a", (called,)), Report("b"), Report("c")], 60)
    assert diagnosis.summary(stall) == "hvd.load_model('best.keras'): rank 0 has waited 70 s for ranks 1-2"
    assert diagnosis.rows([Report("a", (called,))], [stall])[0][1] == "hvd.load_model('best.keras')"


def test_each_waits_for_the_other() -> None:
    reports = [Report("a", (wait("x", 61),)), Report("b", (wait("y", 62),)), Report("c", (wait("x", 61),))]
    assert [(s.key, s.waiting, s.lacking) for s in diagnose(reports, 60)] == [("y", (1,), (0, 2)), ("x", (0, 2), (1,))]


def test_no_rank_can_go_on() -> None:
    """All ranks answer, all are stuck for longer than a question takes, and none has called an awaited operation."""

    def stuck(*waits: Wait) -> Report:
        return Report("a", waits, stuck=True)

    x, y = wait("x", 61), wait("y", 2)
    assert deadlocked([stuck(x), stuck(y), stuck(x)], 1)
    assert deadlocked([stuck(x), stuck(wait("x", 61, "set", (0, 1))), stuck(x)], 1)
    assert not deadlocked([stuck(x), stuck(y), stuck(y)], 3)
    assert not deadlocked([stuck(x), stuck(y), None], 1)
    assert not deadlocked([stuck(x), stuck(y), Report("a", (x,))], 1)
    assert not deadlocked([stuck(x, y), stuck(y), stuck(y)], 1)
    at_work = wait("y", 61, working=50)  # like a slow broadcast, which rank 0 has finished
    assert not deadlocked([stuck(x), stuck(at_work), stuck(at_work)], 1)


def test_only_members_and_the_same_lane_count() -> None:
    """There is a set of ranks 0 and 2. The same name on another lane is another operation."""
    mine, other = wait("x", 99, "set", (0, 2)), wait("x", 99, "eager")
    (stall, *rest) = diagnose([Report("a", (mine,)), Report("b"), Report("c")], 60)
    assert stall.lacking == (2,) and not rest
    assert {s.lacking for s in diagnose([Report("a", (mine,)), Report("b"), Report("c", (other,))], 60)} == {
        (2,),
        (0, 1),
    }


def test_a_joined_rank_is_not_waited_for() -> None:
    reports = [Report("a", (wait("x", 99),)), Report("b", joined=frozenset([("eager", EVERYONE)])), Report("c")]
    assert diagnose(reports, 60)[0].lacking == (2,)


def test_what_all_have_called_stalls_only_when_its_work_does() -> None:
    """A long queue that moves is no stall. A transfer that does not end is one, and waits for no rank."""
    assert diagnose([Report("a", (wait("x", 99, working=1),))] * 3, 60) == []
    (stall,) = diagnose([Report("a", (wait("x", 99, working=61),))] * 3, 60)
    assert stall.lacking == () and "all ranks have called it" in diagnosis.summary(stall)


def test_many_calls_are_cut() -> None:
    reports = [Report("a", tuple(wait(f"x{i}", 90) for i in range(9))), Report("b"), Report("c")]
    (first, *_) = diagnosis.rows(reports, diagnose(reports, 60))
    assert first[1].endswith("... and 3 more") and first[1].count("\n") == diagnosis.MOST_CALLS


def test_the_table_is_printed_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    reports = [Report("train.py:12 in step: loss[0] = [red]", (wait("loss", 70),)), None, Report("c")]
    diagnosis.show(reports, diagnose(reports, 60))
    out, err = capsys.readouterr()
    assert not out and "waited 70 s for ranks 1-2" in err and "no answer" in err and "loss[0] = [red]" in err
    assert all(line == line.rstrip() for line in err.splitlines())


# Positions


def test_the_users_line_is_found_below_library_code() -> None:
    """The main thread waits in the library (here: of Python). The innermost line outside is the user's."""
    seen: list[str] = []
    looker = threading.Thread(target=lambda: (time.sleep(0.1), seen.append(positions.main_position())))
    looker.start()
    looker.join()  # this line
    assert "tests/unit/test_stall.py:" in seen[0] and seen[0].endswith("looker.join()  # this line")


def test_what_went_wrong_before_a_call_in_a_finally_is_told() -> None:
    seen: list[str] = []
    looker = threading.Thread(target=lambda: (time.sleep(0.1), seen.append(positions.main_position())))
    with contextlib.suppress(ValueError):
        try:
            raise ValueError("sample 7 is corrupt\nin two lines")
        finally:
            looker.start()
            looker.join()
    assert seen[0].endswith("looker.join() (because of ValueError: sample 7 is corrupt)"), seen


# The watch


def watched(
    size: int,
    function: Callable[[StallWatch, Lane], Any],
    shutdown: float = float("inf"),
    told: list[Told] | None = None,
) -> list[Told]:
    """Run function(watch, lane) on `size` watched ranks.

    Returns the reports and their ranks, also while it runs (`told`).
    """
    told = [] if told is None else told

    def main(transport: ThreadTransport) -> None:
        lane = Lane(transport, Place(size, False))
        watch = StallWatch(transport.mail(), transport.rank, size, lambda: [lane], Limits(CHECK, shutdown), sys.exit)

        def tell(reports: Sequence[Report | None], stalls: Sequence[Stall]) -> None:
            told.append((transport.rank, list(reports), list(stalls)))

        watch.tell = tell
        function(watch, lane)
        transport.barrier()
        if watch.thread.ident:
            watch.stop()

    run_ranks(size, main)
    return told


def watch_of(lane: Lane, shutdown: float = 9, give_up: Callable[[str], object] = sys.exit) -> StallWatch:
    """The watch of a job of one rank, with this lane."""
    assert isinstance(lane.transport, ThreadTransport)
    return StallWatch(lane.transport.mail(), 0, 1, lambda: [lane], Limits(CHECK, shutdown), give_up)


def hang(lane: Lane, name: str = "loss", seconds: float = 0.0) -> Request:
    """A request that stays pending."""
    request = Request(Signature("allreduce", name), lambda lane: None)
    with lane.queue.changed:
        lane.queue.admit(request)
    time.sleep(seconds)
    return request


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_an_absent_rank_is_named_once_in_each_interval(absent: int) -> None:
    def rank_main(watch: StallWatch, lane: Lane) -> None:
        watch.start()
        if lane.transport.rank == absent:
            time.sleep(2.8 * CHECK)
        else:
            hang(lane, seconds=2.8 * CHECK)

    told = watched(3, rank_main)
    assert len(told) == 2 and {who for who, *_ in told} == {0}
    for _, reports, (stall,) in told:
        assert stall.lacking == (absent,) and None not in reports and CHECK <= stall.seconds < 3 * CHECK


@pytest.mark.parametrize("dead", [0, 1, 2])
def test_a_rank_without_a_watch_is_no_answer(dead: int) -> None:
    """If rank 0 has no watch, the next rank reports."""

    def rank_main(watch: StallWatch, lane: Lane) -> None:
        if lane.transport.rank != dead:
            watch.start()
            hang(lane)
        deadline = time.monotonic() + 10
        while not told and time.monotonic() < deadline:
            time.sleep(0.01)

    told: list[Told] = []
    watched(3, rank_main, told=told)
    assert told and {who for who, *_ in told} == {1 if dead == 0 else 0}
    for _, reports, (stall,) in told:
        assert stall.lacking == (dead,) and [rank for rank, r in enumerate(reports) if r is None] == [dead]


def test_nothing_is_said_while_things_move() -> None:
    """There are many short waits of one name, and a shutdown that takes long."""

    def rank_main(watch: StallWatch, lane: Lane) -> None:
        watch.start()
        for i in range(20):
            lane.run(Request(Signature("barrier", "step"), lambda lane: None))
            time.sleep(0.01 * CHECK * (i + lane.transport.rank))
        if lane.transport.rank == 0:
            time.sleep(2 * CHECK)
        lane.leave()

    assert watched(3, rank_main) == []


def test_a_rank_that_has_joined_is_neither_stalled_nor_waited_for() -> None:
    """Rank 1 is in join() for long. Rank 0 waits for rank 2 alone, and the report names rank 2."""

    def rank_main(watch: StallWatch, lane: Lane) -> None:
        watch.start()
        if lane.transport.rank == 1:
            request = Request(JOIN, lambda lane: None)
            with lane.queue.changed:
                lane.queue.admit(request)
        time.sleep(2 * CHECK)
        if lane.transport.rank == 0:
            hang(lane)
        time.sleep(1.8 * CHECK)

    ((_, _, (stall,)),) = watched(3, rank_main)
    assert (stall.waiting, stall.lacking) == ((0,), (2,))


def test_past_the_second_limit_all_pending_and_later_calls_fail(capfd: pytest.CaptureFixture[str]) -> None:
    def rank_main(watch: StallWatch, lane: Lane) -> None:
        watch.start()
        if lane.transport.rank == 1:
            time.sleep(3 * CHECK)
        else:
            request = hang(lane)
            with pytest.raises(
                StallError, match=r"(?s)allreduce 'loss': ranks 0, 2 have waited.*for rank 1.*Rank 1 is at"
            ):
                request.handle.wait()
        with pytest.raises(StallError):
            lane.run(Request(Signature("allreduce", "next"), lambda lane: None))

    assert len(watched(3, rank_main, shutdown=2 * CHECK)) == 2
    assert (
        "hvdlite: rank 1: the job has stalled" in capfd.readouterr().err
    )  # it waits for nothing, so it reports by itself


def test_the_second_limit_is_not_put_off_by_what_was_told_lately() -> None:
    watch = StallWatch(alone().mail(), 0, 1, list, Limits(CHECK, 1.2 * CHECK), sys.exit)
    now = time.monotonic()
    watch.patience.note_report(now)
    watch.inquire(CHECK, now)
    assert watch.inquiries.open is None
    watch.inquire(1.2 * CHECK, now)
    assert watch.inquiries.open is not None


def test_work_that_takes_longer_than_the_second_limit_ends_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """All ranks have called it: a large broadcast over a slow network."""
    lane, now = Lane(alone(), Place(1, False)), time.monotonic()
    watch = watch_of(lane, CHECK)
    request = hang(lane)
    request.queued = request.agreed = now - 100
    watch.conclude(Inquiry(1, now, now, {0: watch.board.report()}))
    assert "all ranks have called it" in capfd.readouterr().err and watch.ending.begun is None


def test_a_deadlock_is_believed_only_when_it_is_seen_twice() -> None:
    """Ranks are asked one after another. The first may have gone on when the last one answers."""
    letters: list[object] = []

    class Mail:
        def post(self, letter: object, receiver: int) -> None:
            letters.append(letter)

    def answers(*called: float) -> dict[int, Report]:
        waits = [Wait("eager", (0, 1), key, 100.0, 0.0, at) for key, at in zip("xy", called, strict=True)]
        return {rank: Report("a", (each,), stuck=True) for rank, each in enumerate(waits)}

    watch = StallWatch(cast(Any, Mail()), 0, 2, list, Limits(CHECK, 9), sys.exit)
    now = time.monotonic()
    for called in ((1.0, 2.0), (1.0, 3.0)):
        watch.conclude(Inquiry(1, now, now, answers(*called)))
        assert watch.inquiries.open is not None and watch.ending.begun is None and type(letters[-1]).__name__ == "Ask"
    watch.conclude(Inquiry(2, now, now, answers(1.0, 3.0)))
    assert watch.ending.begun is not None and type(letters[-1]).__name__ == "End"


def test_only_a_caller_that_nothing_can_interrupt_is_ended() -> None:
    """Other callers get the error, and may save their work for as long as they need."""
    given_up: list[str] = []
    lane = Lane(alone(), Place(1, False))
    watch = watch_of(lane, CHECK, given_up.append)
    watch.ending.begun, watch.ending.text = time.monotonic() - 100, "over"
    watch.look(time.monotonic())
    assert given_up == []
    lane.turn.lent = True
    watch.look(time.monotonic())
    assert given_up == ["over"]


def test_a_caller_in_the_roll_call_gets_the_error() -> None:
    def rank_main(watch: StallWatch, lane: Lane) -> None:
        watch.start()
        if lane.transport.rank == 0:
            time.sleep(3 * CHECK)
        else:
            with pytest.raises(StallError):
                lane.run(Request(Signature("barrier", "x"), lambda lane: None))

    watched(2, rank_main, shutdown=CHECK)


def waiter(thread: int, done: bool = False) -> tuple[int, Handle]:
    """A thread that waits for something."""
    handle: Handle[None] = Handle(Changed())
    handle.done = done
    return thread, handle


def soon_stuck(watch: StallWatch) -> bool:
    """Whether the process is stuck, once other threads, also of other tests, have ended."""
    until = time.monotonic() + 10
    while not watch.board.report().stuck and time.monotonic() < until:
        time.sleep(0.001)
    return watch.board.report().stuck


@pytest.mark.parametrize(
    "change", ["another thread has called", "another thread may call", "it has joined", "nobody waits"]
)
def test_a_rank_is_stuck_while_its_only_thread_waits(change: str) -> None:
    lane, request_over = Lane(alone(), Place(1, False)), list[threading.Event]()
    watch = watch_of(lane)
    hang(lane)
    lane.turn.lent, lane.turn.lender = True, threading.get_ident()
    assert soon_stuck(watch)
    lane.turn.lent, lane.queue.changed.waiting = False, [waiter(threading.get_ident())]
    assert soon_stuck(watch)
    lane.queue.changed.waiting = [waiter(threading.get_ident(), done=True)]  # it is about to wake up
    assert not watch.board.report().stuck
    lane.queue.changed.waiting = [waiter(threading.get_ident())]
    gone = threading.Thread(target=hang, args=(lane, "accuracy"))
    gone.start()
    gone.join()  # a thread that called and has ended
    assert soon_stuck(watch)
    if change == "another thread has called":
        called, over = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: (hang(lane, "again"), called.set(), over.wait()))
        other.start()
        called.wait()
        request_over.append(over)
    elif change == "another thread may call":
        idle = ThreadPoolExecutor(1)
        idle.submit(int).result()
        assert soon_stuck(watch)  # with an idle thread of a pool
        begun, over = threading.Event(), threading.Event()
        threading.Thread(target=lambda: (begun.set(), over.wait())).start()
        begun.wait()
        request_over.append(over)
    elif change == "it has joined":
        with lane.queue.changed:
            lane.queue.admit(Request(JOIN, lambda lane: None))
    else:  # a thread that did not call
        lane.queue.changed.waiting = [waiter(0)]
    assert not watch.board.report().stuck
    for over in request_over:
        over.set()


def test_a_rank_is_stuck_in_a_step_of_tensorflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TensorFlow thread, which Python did not start, waits for the step that the main thread waits for."""
    lane, steps, over = Lane(alone(), Place(1, False)), set[int](), threading.Event()
    watch = watch_of(lane)
    called = threading.Event()
    _thread.start_new_thread(lambda: (hang(lane), called.set(), over.wait()), ())
    called.wait()
    (thread,) = lane.queue.callers
    lane.queue.changed.waiting = [waiter(thread)]
    monkeypatch.setattr("hvdlite.observers.board.threads_in_steps", lambda: steps)
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    assert not watch.board.report().stuck
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert not watch.board.report().stuck  # the main thread computes something
    steps.add(threading.get_ident())
    assert soon_stuck(watch)
    steps.add(thread + 1)  # another thread has begun a step, too
    assert not watch.board.report().stuck
    steps.remove(thread + 1)
    lane.queue.changed.waiting = []
    assert not watch.board.report().stuck
    hang(lane, "accuracy")
    lane.queue.changed.waiting = [
        waiter(threading.get_ident()),
        waiter(thread),
    ]  # the main thread waits by itself, after its step
    assert soon_stuck(watch)
    over.set()


def test_a_suspended_process_has_not_waited() -> None:
    lane = Lane(alone(), Place(1, False))
    watch = watch_of(lane)
    request = hang(lane)
    request.queued = request.agreed = time.monotonic() - 100
    watch.board.note_suspension(time.monotonic() + 1)  # late, on a busy machine
    assert watch.board.longest_wait() >= 100 and watch.board.report().waits[0].seconds >= 100
    watch.board.looked = time.monotonic() - 99
    watch.board.note_suspension(time.monotonic())
    wait = watch.board.report().waits[0]
    assert watch.board.longest_wait() < 10 and wait.seconds < 10 and wait.working < 10


def test_what_goes_wrong_in_the_watch_ends_no_job(caplog: pytest.LogCaptureFixture) -> None:
    """The error is logged, and the lanes go on without a watch."""

    def broken(*_: object) -> None:
        raise ValueError("as if")

    def rank_main(watch: StallWatch, lane: Lane) -> None:
        watch.tell = broken  # the user may have replaced standard error
        if lane.transport.rank == 1:
            watch.look = broken  # type: ignore[assignment]
        watch.start()
        time.sleep(2 * CHECK if lane.transport.rank else 0)
        assert lane.run(Request(Signature("barrier", "x"), lambda lane: 7)) == 7
        assert watch.thread.is_alive() == (lane.transport.rank == 0)

    watched(2, rank_main)
    assert [record.getMessage() for record in caplog.records] == ["the stall watch of rank 1 has ended"]


def test_a_position_needs_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert f"{__file__}:" in positions.main_position()


def test_settings_are_rank_0s() -> None:
    """That holds also if ranks have different settings, because making the watch is collective."""

    def limits(transport: ThreadTransport, check: float, shutdown: float) -> Limits | None:
        if transport.rank:
            check, shutdown = check + transport.rank, shutdown + transport.rank
        made = watch(transport, list, StallLimits(check, shutdown), lambda text: None)
        if made:
            made.stop()
        return made.limits if made else None

    assert set(run_ranks(3, lambda t: limits(t, 60, 0))) == {Limits(60, float("inf"))}
    assert set(run_ranks(3, lambda t: limits(t, 60, 5))) == {Limits(5, 5)}
    assert set(run_ranks(3, lambda t: limits(t, 0, 5))) == {None}
    assert run_ranks(1, lambda t: limits(t, 60, 5)) == [None]


def test_a_letter_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank with thousands of pending calls reports the oldest ones only. No deadlock can be diagnosed from these."""
    monkeypatch.setattr(Board, "stuck", True)

    def rank_main(transport: ThreadTransport) -> None:
        lane = Lane(transport, Place(1, False))
        watch = StallWatch(transport.mail(), 0, 1, lambda: [lane], Limits(CHECK, CHECK), sys.exit)
        for i in range(MOST_WAITS):
            hang(lane, f"x{i}")
        assert watch.board.report().stuck
        for i in range(MOST_WAITS, 2 * MOST_WAITS):
            hang(lane, f"x{i}")
        report = watch.board.report()
        assert [w.key for w in report.waits] == [f"allreduce 'x{i}'" for i in range(len(report.waits))]
        assert len(pickle.dumps(report)) < 100 * MOST_WAITS and not report.stuck

    run_ranks(1, rank_main)
