"""The meter's sums, the log of steps, and the summary, with a clock that the test sets."""

from __future__ import annotations

import inspect
import io
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest

from hvdlite.algorithms import Place
from hvdlite.api.summary import WIDTH, Summary, duration, show, since_if_same_job, size
from hvdlite.job.records import Beginning, Record
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Seat
from hvdlite.lanes.request import Changed, Handle, Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.observers import meter
from hvdlite.observers.meter import LEAST_PAUSE, PAUSE, SETTLED, Meter, Spent, StepLog, Stretch
from hvdlite.transports.sent_bytes import SentBytes
from hvdlite.transports.threads import alone
from tests.unit.interrupts import raising_at


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def pass_(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(meter, "time", found)
    return found


LANES = Seat((0,), 0), Seat((0,), 0)


def request(name: str = "x") -> Request[None]:
    return Request[None](Signature("note", name), lambda at: None)


def operation(measuring: Meter, clock: Clock, seconds: float) -> None:
    """An operation that is under way for so many seconds."""
    begin(measuring)
    clock.pass_(seconds)
    end(measuring)


def begin(measuring: Meter, lane: Seat = LANES[0]) -> None:
    measuring.agreed(lane, request())


def end(measuring: Meter, lane: Seat = LANES[0]) -> None:
    measuring.done(lane, request())


def in_a_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_a_wait_is_for_ranks_until_an_operation_is_under_way(clock: Clock) -> None:
    measuring = Meter(SentBytes())
    clock.pass_(1)
    measuring.wait_begins()
    clock.pass_(2)
    operation(measuring, clock, 4)
    measuring.wait_ends()
    clock.pass_(8)
    assert measuring.spent == Spent(exposed=6, waiting=2, under_way=4)


def test_an_operation_is_exposed_only_while_a_thread_waits(clock: Clock) -> None:
    measuring = Meter(SentBytes())
    begin(measuring)
    clock.pass_(1)
    measuring.wait_begins()
    clock.pass_(2)
    end(measuring)
    measuring.wait_ends()
    operation(measuring, clock, 4)
    assert measuring.spent == Spent(exposed=2, waiting=0, under_way=7)


def test_waits_of_two_threads_and_two_operations_count_once(clock: Clock) -> None:
    measuring = Meter(SentBytes())
    for lane in LANES:
        begin(measuring, lane)
    measuring.wait_begins()

    def other_thread() -> None:
        measuring.wait_begins()
        clock.pass_(3)
        measuring.wait_ends()

    in_a_thread(other_thread)
    end(measuring, LANES[0])
    clock.pass_(1)
    end(measuring, LANES[1])
    clock.pass_(2)
    measuring.wait_ends()
    clock.pass_(8)
    assert measuring.spent == Spent(exposed=6, waiting=2, under_way=4)


def test_a_request_that_fails_before_all_ranks_call_is_no_operation(clock: Clock) -> None:
    measuring = Meter(SentBytes())
    begin(measuring)
    end(measuring, LANES[1])
    clock.pass_(1)
    assert measuring.spent.under_way == 1


def test_an_operation_ends_though_its_request_is_in_the_next_round_already(clock: Clock) -> None:
    """The user's thread may begin the next round before the lane's thread notifies observers of the last one's end."""
    measuring, same = Meter(SentBytes()), request()
    same.agree(flag=0)
    measuring.agreed(LANES[0], same)
    clock.pass_(1)
    same.again(Round("round {}", (2,)))
    measuring.done(LANES[0], same)
    clock.pass_(2)
    assert measuring.spent == Spent(0, 0, under_way=1)


@pytest.mark.parametrize(
    "method", [Lane.run_here, Lane.execute, Lane.settle, Handle.wait, Changed.wait_begins, Changed.wait_ends,
               Meter.wait_begins, Meter.wait_ends, Meter.agreed, Meter.done, Meter.pass_time],
)  # fmt: skip
def test_a_signals_handler_that_raises_leaves_no_wait_and_no_operation(method: Callable[..., object]) -> None:
    """At each line of these methods: after the next call nothing waits, and nothing is under way."""
    first, reached = method.__code__.co_firstlineno, 0
    for line in range(first + 1, first + len(inspect.getsource(method).splitlines())):
        measuring = Meter(SentBytes())
        lane = Lane(alone(), Place(1, False), observers=[measuring])

        def both(name: str, lane: Lane = lane) -> None:
            lane.run(request(name))
            lane.submit(request(name)).wait()

        with raising_at(method, line):
            try:
                both("x")
            except KeyboardInterrupt:
                reached += 1
        both("y")
        assert not measuring.waits and not measuring.operations, line
    assert reached


def test_a_forked_child_does_not_wait_for_its_parents_threads(clock: Clock) -> None:
    """At the fork another thread holds the lock, and waits while an operation is under way."""
    measuring, held, over = Meter(SentBytes()), threading.Event(), threading.Event()

    def other_thread() -> None:
        measuring.wait_begins()
        begin(measuring)
        with measuring.lock:
            held.set()
            over.wait()

    thread = threading.Thread(target=other_thread)
    thread.start()
    held.wait()
    measuring.go_on_in_child()
    clock.pass_(1)
    assert measuring.spent == Spent()
    over.set()
    thread.join()


def test_sums_run_on_while_a_thread_waits(clock: Clock) -> None:
    measuring = Meter(SentBytes())
    measuring.wait_begins()
    clock.pass_(1)
    assert measuring.spent == Spent(1, 1, 0)
    clock.pass_(1)
    assert measuring.spent == Spent(2, 2, 0)


def logged(clock: Clock, intervals: Iterable[float], who: Iterable[int] = (1,)) -> StepLog:
    """A log in which each of these optimizers ends a step after each interval."""
    found = StepLog(Meter(SentBytes()), clock.now)
    found.start()
    for seconds in intervals:
        clock.pass_(seconds)
        for each in who:
            found.end(each)
    return found


def test_the_first_step_begins_the_count(clock: Clock) -> None:
    log = logged(clock, [5, 1, 1, 1])
    assert (log.number, log.first, log.steps) == (4, 5, Stretch(3, 3, Spent()))


@pytest.mark.parametrize("who", [(1,), (1, 2), (1, 2, 3)])
def test_a_step_of_several_optimizers_counts_once(clock: Clock, who: tuple[int, ...]) -> None:
    log = logged(clock, [1] * 10, who)
    assert log.number == 10 and log.steps == Stretch(9, 9, Spent())


def test_another_optimizer_goes_on_with_the_count(clock: Clock) -> None:
    log = logged(clock, [1] * 10)
    for _ in range(10):
        clock.pass_(1)
        log.end(2)
    assert (log.number, log.steps) == (20, Stretch(19, 19, Spent()))


@pytest.mark.parametrize(("loop", "steps"), [((1, 1, 2), 2), ((1, 2, 2), 2), ((1, 1, 1, 2), 3), ((1, 2, 3, 2), 2)])
def test_optimizers_that_step_in_unequal_numbers(clock: Clock, loop: tuple[int, ...], steps: int) -> None:
    """A loop has as many steps as the optimizer that steps most often."""
    log = StepLog(Meter(SentBytes()), clock.now)
    for _ in range(20):
        for who in loop:
            log.end(who)
    assert abs(log.number - 20 * steps) <= 1


def test_a_step_with_more_than_the_usual_computing_is_a_pause(clock: Clock) -> None:
    usual = [1.0] * (SETTLED + 1)
    log = logged(clock, [*usual, PAUSE, *usual, PAUSE + 0.5, *usual])
    assert log.pauses == Stretch(1, PAUSE + 0.5, Spent())
    assert log.steps == Stretch(3 * SETTLED + 3, 3 * SETTLED + 2 + PAUSE, Spent())


def test_a_hitch_of_a_busy_machine_is_no_pause(clock: Clock) -> None:
    log = logged(clock, [*[0.001] * 10, 0.9 * LEAST_PAUSE, 1.1 * LEAST_PAUSE])
    assert log.pauses == Stretch(1, pytest.approx(1.1 * LEAST_PAUSE), Spent())  # type: ignore[arg-type]


def test_pauses_count_once_the_usual_time_is_known(clock: Clock) -> None:
    for intervals, pauses in ((SETTLED - 1, 0), (SETTLED, 1)):
        assert logged(clock, [1.0] * (1 + intervals) + [PAUSE + 0.5]).pauses.number == pauses


def test_the_first_steps_are_no_pauses(clock: Clock) -> None:
    assert logged(clock, [1, 1, 100, 1, 1]).pauses == Stretch()


def test_a_lasting_change_is_no_pause(clock: Clock) -> None:
    log = logged(clock, [*[1.0] * 40, *[100.0] * 100])
    assert log.pauses.number <= meter.RECENT // 2 + 1


def test_a_long_wait_for_other_ranks_is_no_pause(clock: Clock) -> None:
    log = logged(clock, [1] * 10)
    log.meter.wait_begins()
    clock.pass_(100)
    log.meter.wait_ends()
    clock.pass_(1)
    log.end(1)
    assert log.pauses.number == 0 and log.steps.spent == Spent(100, 100, 0) and log.steps.seconds == 110


BEGINNING = Beginning(launch=0.5, imports=2, init=0.25, first_step=1.25)


def record(compute: float, waiting: float, communication: float, under_way: float = 0.0, number: int = 100) -> Record:
    """A rank's record with these seconds per step."""
    spent = Spent(
        (waiting + communication) * number, waiting * number, (under_way or communication) * number, 1000 * number, 10
    )
    steps = Stretch(number, (compute + waiting + communication) * number, spent)
    return Record(0, 60, BEGINNING, number, 32 * number, steps, Stretch(2, 3, Spent()), 10**9, 0)


SUMMARY = Summary((record(0.06, 0.02, 0.02), record(0.08, 0.0, 0.02), record(0.06, 0.02, 0.02, 0.05)), hosts=1)


def test_a_summary_is_of_all_ranks() -> None:
    found = {name.removeprefix("hvdlite/"): value for name, value in SUMMARY.as_dict().items()}
    expected = {
        "steps": 100, "steps_per_s": 10, "samples_per_s": 3 * 32 * 10, "step_ms": 100, "compute_ms": 200 / 3,
        "communication_ms": 20, "waiting_ms": 40 / 3, "hidden_comm_ms": 10, "exposed_comm_pct": 100 / 3,
        "waiting_pct": 40 / 3, "slowest_rank": 1, "slowest_rank_extra_ms": 20, "pauses": 2, "pauses_s": 3,
        "network_bytes_per_step": 1000, "memory_bytes_per_step": 0.1, "peak_memory_mb": 1000, "peak_gpu_memory_mb": 0,
        "first_step_s": 4, "first_step_launch_s": 0.5, "first_step_imports_s": 2, "first_step_init_s": 0.25,
        "wall_s": 60,
    }  # fmt: skip
    assert found == pytest.approx(expected)


def test_the_table_says_it_in_words() -> None:
    text = str(SUMMARY)
    for words in ("3 ranks on 1 host", "60 s in all", "100 steps", "10 steps/s",
                  "960 samples/s", "A step takes 100 ms", "66.7 ms  67%", "20 ms  20%", "13.3 ms  13%",
                  "1: computes 20 ms (33%) longer per step than the others", "after 4 s"):  # fmt: skip
        assert words in text, words
    assert len({len(line) for line in text.splitlines()}) == 1


def test_a_summary_without_steps() -> None:
    none = Record(0, 2, BEGINNING, 0, 0, Stretch(), Stretch(), 10**6, 0)
    found = Summary((none,), 1)
    assert "no training steps" in str(found) and found.as_dict()["hvdlite/steps_per_s"] == 0


def test_since_leaves_out_what_was_before() -> None:
    earlier = Summary(tuple(record(0.1, 0.1, 0.1, number=40) for _ in range(3)), 1)
    later = Summary(
        tuple(
            Record(0, 70, BEGINNING, 140, each.samples + 1280, each.steps + before.steps, each.pauses, 0, 0)
            for each, before in zip(SUMMARY.records, earlier.records, strict=True)
        ),
        1,
    )
    found = later.since(earlier).as_dict()
    for name in ("steps", "step_ms", "compute_ms", "waiting_ms", "samples_per_s"):
        assert found[f"hvdlite/{name}"] == pytest.approx(SUMMARY.as_dict()[f"hvdlite/{name}"]), name
    assert found["hvdlite/pauses"] == 0


def test_ranks_that_differ() -> None:
    """The longest time, the largest memory, the most steps; the mean of pauses. A step of 100 ms has 32 samples."""
    other = replace(SUMMARY.records[0], wall=70, number=101, samples=32 * 101, pauses=Stretch(), peak=5 * 10**8,
                    peak_on_gpu=2 * 10**9)  # fmt: skip
    found = Summary((other, *SUMMARY.records[1:]), 1)
    expected = {"wall_s": 70, "steps": 101, "samples_per_s": 960, "pauses": 4 / 3, "pauses_s": 2,
                "peak_memory_mb": 1000, "peak_gpu_memory_mb": 2000}  # fmt: skip
    assert {name: found.as_dict()[f"hvdlite/{name}"] for name in expected} == pytest.approx(expected)
    text = str(found)
    for words in ("pauses", "2, 2 s in all", "0: 500 MB, 1: 1 GB", "peak on GPU", "0: 2 GB, 1: 0 bytes", "101 steps"):
        assert words in text, words


def test_lines_without_a_number_are_left_out() -> None:
    plain = replace(record(0.06, 0.02, 0.02, under_way=0.02 - 1e-9), pauses=Stretch())
    found = Summary((plain, plain), 1)
    assert found.hidden == 0
    for words in ("hidden", "pauses", "peak on GPU"):
        assert words not in str(found), words
    assert "hidden" in str(SUMMARY) and "10 ms" in str(SUMMARY)


def idle(first_step: float) -> Record:
    """A rank without steps, such as a parameter server."""
    beginning = Beginning(0.5, 2, 0.25, first_step)
    return Record(0, 60, beginning, 0, 0, Stretch(), Stretch(), 10**9, 0)


def test_ranks_without_steps_are_left_out_of_means() -> None:
    """A server waits 57 s for clients. Steps take 100 ms as before, and the first of them was after 4 s."""
    found, plain = Summary((idle(57), *SUMMARY.records), 1).as_dict(), SUMMARY.as_dict()
    for name in ("step_ms", "compute_ms", "waiting_ms", "communication_ms", "hidden_comm_ms", "samples_per_s",
                 "steps_per_s", "slowest_rank_extra_ms", "first_step_s"):  # fmt: skip
        assert found[f"hvdlite/{name}"] == pytest.approx(plain[f"hvdlite/{name}"]), name
    assert found["hvdlite/slowest_rank"] == 2
    assert "slowest rank" not in str(Summary((idle(1), SUMMARY.records[0]), 1))


def test_samples_of_ranks_with_steps_of_other_lengths() -> None:
    """320 samples/s at 100 ms per step, and 160 at 200 ms: strategies let ranks go on at their own speed."""
    found = Summary((record(0.1, 0, 0), record(0.2, 0, 0, number=50)), 1)
    assert found.samples_per_second == pytest.approx(480)


def test_since_refuses_what_is_no_earlier_summary_of_the_job() -> None:
    another = Summary(tuple(replace(each, began=1.0) for each in SUMMARY.records), 1)
    with pytest.raises(ValueError, match=r"before the last hvd\.init"):
        SUMMARY.since(another)
    with pytest.raises(TypeError, match=r"what hvd\.summary\(\) has returned"):
        SUMMARY.since(SUMMARY.as_dict())  # type: ignore[arg-type]
    assert since_if_same_job(SUMMARY, another) is SUMMARY and since_if_same_job(SUMMARY, None) is SUMMARY
    assert since_if_same_job(SUMMARY, SUMMARY).number == 0


@pytest.mark.parametrize("ranks", [1, 64, 1000])
def test_a_table_of_many_ranks_fits(ranks: int) -> None:
    records = tuple(replace(record(0.1 + rank, 0.2, 0.1), samples=10**9, number=10**6) for rank in range(ranks))
    text = str(Summary(records, max(ranks // 8, 1)))
    assert {len(line) for line in text.splitlines()} == {WIDTH} and len(text.splitlines()) < 20
    assert "samples/s" in text and "1,000,000 steps" in text


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_table_can_be_printed_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.TextIOWrapper(io.BytesIO(), encoding)
    monkeypatch.setattr("sys.stdout", page)
    show("╭ 10 ms █")
    page.seek(0)
    assert page.read() == ("╭ 10 ms █\n" if encoding == "utf-8" else "? 10 ms ?\n")


@pytest.mark.parametrize(("seconds", "text"), [
    (0, "0 us"), (12.34e-6, "12 us"), (1.234e-3, "1.23 ms"), (0.9999, "1 s"), (1.5, "1.5 s"), (99.9, "99.9 s"),
    (125.4, "2 min 05 s"), (3725, "1 h 02 min"), (0.99951e-3, "1 ms"),
])  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("nbytes", "text"), [
    (0, "0 bytes"), (999, "999 bytes"), (1500, "1.5 KB"), (123.4e6, "123 MB"), (5.5e9, "5.5 GB"), (2e13, "20,000 GB"),
])  # fmt: skip
def test_sizes(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_the_meter_is_cheap() -> None:
    """A step of a small model has some 6 changes; each takes about 0.6 us. (Here: below 6 us, on a busy machine.)"""
    measuring = Meter(SentBytes())

    def one() -> float:
        began = time.perf_counter()
        for _ in range(1000):
            measuring.wait_begins()
            measuring.wait_ends()
        return (time.perf_counter() - began) / 2000

    assert min(one() for _ in range(5)) < 6e-6


def test_bytes_count_in_the_step_that_sends_them(clock: Clock) -> None:
    sent = SentBytes()
    log = StepLog(Meter(sent), 0)
    for number in range(4):
        sent.counts[0] += 10**number
        sent.counts[1] += 7
        log.end(1)
    assert (log.steps.spent.network, log.steps.spent.memory) == (1110, 21)
