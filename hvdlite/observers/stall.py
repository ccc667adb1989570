"""The stall watch: says which collectives wait for which ranks, for how long, and at which line each rank is.

Each rank has a thread that wakes a few times per second, looks at what is pending on its lanes, and fetches letters.
Letters are sent only once somebody has waited for too long:

    a rank that has waited  --alarm-->   the lowest rank that answers (the first to be asked is 0)
    that rank               --ask-->     everyone; whoever does not answer in time is "no answer"
                            --report-->  back: what is pending there, and where its main thread is
    it prints the table, and, past the limit for shutting down, or where every rank waits for others who wait for it,
                           --end-->    everyone: what is pending fails

So nothing is asked of a rank that never entered a collective, or loops for ever: its thread answers. The letters
travel over MPI, on a communicator of their own: that reaches every rank of every host without a port, an address or a
firewall's leave. Rejected: sockets, which need all three; a thread that blocks in a receive, since MPI waits by
spinning. A look and a fetch take some 150 us, five times per second or less: below 0.1 % of a core (measured, two busy
ranks on two cores), and neither a scalar all-reduce nor a loop in pure Python became measurably slower.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdlite.errors import StallError
from hvdlite.gpu_streams import adopt_gpu
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import JOIN, LEAVE
from hvdlite.observers import diagnosis
from hvdlite.observers.diagnosis import Report, Wait
from hvdlite.observers.letters import Alarm, Answer, Ask, End, Heard
from hvdlite.observers.positions import main_position, own_threads, threads_in_steps, threads_of_users
from hvdlite.transports import Communicator, Mail

TICK = 0.2  # seconds between looks, at most
BUSY_TICK = 0.01  # while letters are under way
SLACK = 0.5  # for a thread that must first get a core, and Python's lock
SUSPENSION = 2.0  # longer than this no look is late, unless the process was stopped
GRACE = 2.0  # between the error on all pending calls and the end of a process that cannot raise it
MOST_WAITS = 1000  # in a report


@dataclass(frozen=True)
class Limits:
    """Seconds of waiting: `check` until it is told, `shutdown` until it ends the job (infinite: never)."""

    check: float
    shutdown: float

    @property
    def tick(self) -> float:
        return min(TICK, self.check / 20)


@dataclass
class Inquiry:
    """Reports asked for and not all here yet."""

    serial: int
    begun: float
    deadline: float
    reports: dict[int, Report] = field(default_factory=dict)


@dataclass
class Appeal:
    """An alarm that `judge` has not answered yet."""

    judge: int
    deadline: float


class StallWatch:
    """Watches a job's lanes until `stop`. Makes its thread at `start`. lanes: those that there are at the moment."""

    def __init__(
        self, mail: Mail, rank: int, size: int, lanes: Callable[[], list[Lane]], limits: Limits,
        give_up: Callable[[str], object] = sys.exit,
    ) -> None:
        """give_up: ends the job, and says why."""
        self.mail, self.rank, self.size, self.lanes, self.limits = mail, rank, size, lanes, limits
        self.give_up = give_up
        self.tell: Callable[..., None] = diagnosis.show
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.main, name="hvdlite-stall-watch", daemon=True)
        self.quiet_until = self.woke = 0.0
        self.looked = time.monotonic()
        self.told_at = -float("inf")
        self.appeal: Appeal | None = None
        self.inquiry: Inquiry | None = None
        self.serial = 0
        self.suspected: list[set[tuple[Any, ...]]] = []  # all ranks' waits when none seemed able to go on
        self.ended_at: float | None = None
        self.text = ""

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Collective, once nothing is pending anywhere: waits for all ranks."""
        self.stopping.set()
        self.thread.join()
        self.mail.close()

    def main(self) -> None:
        while not self.stopping.wait(self.pause()):
            self.note_suspension(time.monotonic())
            adopt_gpu()
            try:
                while (letter := self.mail.fetch()) is not None:
                    self.read(*letter)
                self.look(time.monotonic())
                self.looked = time.monotonic()  # telling may take long
            except Exception:
                logging.getLogger("hvdlite").exception("the stall watch of rank %d has ended", self.rank)
                return

    def note_suspension(self, now: float) -> None:
        """Time in which this process was stopped (Ctrl-Z, a scheduler that takes turns) is no waiting."""
        if now - self.looked > self.limits.tick + SUSPENSION:
            self.woke = now
        self.looked = now

    def since(self, moment: float) -> float:
        """Seconds since then; since the process woke, if that was later."""
        return time.monotonic() - max(moment, self.woke)

    def pause(self) -> float:
        """Until the next look: sooner when a wait is about to become too long."""
        if self.inquiry or self.appeal:
            return BUSY_TICK
        due = self.limits.check - self.longest_wait()
        return min(self.limits.tick, max(due, BUSY_TICK)) if due > 0 else self.limits.tick

    def longest_wait(self) -> float:
        """Seconds that the oldest pending request is old. Not counted: `patient` ones."""
        pending = [request for lane in self.lanes() for request in list(lane.queue.pending.values())]
        queued = [request.queued for request in pending if request.queued and not patient(request)]
        return self.since(min(queued)) if queued else 0.0

    # What to do next

    def look(self, now: float) -> None:
        if self.ended_at is not None:
            self.last_resort(now)
        elif self.inquiry:
            if len(self.inquiry.reports) == self.size or now >= self.inquiry.deadline:
                self.conclude(self.inquiry)
        elif self.appeal:
            if now >= self.appeal.deadline:
                self.alarm(self.appeal.judge + 1, now)
        elif now >= self.quiet_until and self.longest_wait() >= self.limits.check:
            self.alarm(0, now)

    def alarm(self, judge: int, now: float) -> None:
        """Turn to the lowest rank that may answer; in the end to oneself."""
        waited = self.longest_wait()
        self.quiet_until = now + min(
            self.limits.check, self.limits.shutdown - waited if waited < self.limits.shutdown else self.limits.check
        )
        if judge >= self.rank:
            self.appeal = None
            self.inquire(waited, now)
        else:
            self.appeal = Appeal(judge, now + self.limits.tick + SLACK / 2)
            self.mail.post(Alarm(waited), judge)

    def inquire(self, seconds: float, now: float) -> None:
        """Ask everyone, unless that was done lately for the same reason."""
        news = now - self.told_at >= self.limits.check / 2 or seconds >= self.limits.shutdown
        if not self.inquiry and news:
            self.ask(now)

    def ask(self, now: float) -> None:
        self.serial += 1
        self.inquiry = Inquiry(self.serial, now, now + self.limits.tick + SLACK, {self.rank: self.report()})
        for other in range(self.size):
            if other != self.rank:
                self.mail.post(Ask(self.serial), other)

    # Letters

    def read(self, sender: int, letter: object) -> None:
        if isinstance(letter, Ask):
            self.mail.post(Answer(letter.serial, self.report()), sender)
        elif isinstance(letter, Answer):
            if self.inquiry and letter.serial == self.inquiry.serial:
                self.inquiry.reports[sender] = letter.report
        elif isinstance(letter, Alarm):
            self.mail.post(Heard(), sender)
            self.inquire(letter.seconds, time.monotonic())
        elif isinstance(letter, Heard):
            self.appeal = None
        elif isinstance(letter, End):
            self.end(letter.text)

    def report(self) -> Report:
        waits = [
            Wait(lane.name, tuple(lane.members), key, self.since(request.queued),
                 self.since(request.agreed) if request.agreed else 0.0, request.queued, request.title(lane.user))
            for lane in self.lanes() for key, request in list(lane.queue.pending.items())
            if not patient(request)
        ]  # fmt: skip
        oldest = sorted(waits, key=lambda wait: wait.called)[:MOST_WAITS]
        joined = frozenset((lane.name, tuple(lane.members)) for lane in self.lanes() if JOIN.key in lane.queue.pending)
        return Report(main_position(), tuple(oldest), joined, self.stuck and len(waits) <= MOST_WAITS)

    @property
    def stuck(self) -> bool:
        """Whether the main thread waits, no other that there is has ever called or runs code of the user's, and no call
        will be answered by this rank. A thread of TensorFlow's calls for the thread that is in a step."""
        lanes = self.lanes()
        main = threading.main_thread().ident or 0
        lenders = {lane.turn.lender for lane in lanes if lane.turn.lent}
        waiting = lenders.union(*(lane.queue.changed.waiters() for lane in lanes))
        callers = set().union(*(lane.queue.living_callers() for lane in lanes))
        if "tensorflow" in sys.modules:
            in_steps, own = threads_in_steps(), own_threads()
            if in_steps == {main} and waiting - own:
                waiting.add(main)
            if in_steps <= {main}:
                callers &= own
        waits = main in waiting and callers | (threads_of_users() - waiting) <= {main}
        return waits and not any(patient(each) for lane in lanes for each in list(lane.queue.pending.values()))

    # The verdict

    def conclude(self, inquiry: Inquiry) -> None:
        self.inquiry = None
        reports = [inquiry.reports.get(rank) for rank in range(self.size)]
        stalls = diagnosis.diagnose(reports, self.limits.check)
        if not stalls:
            return  # it came right meanwhile
        deadlocked = diagnosis.deadlocked(reports, time.monotonic() - inquiry.begun)
        if deadlocked and (waits := diagnosis.identities(reports)) != self.suspected:
            self.suspected = waits  # ranks have answered one after another: only if all say the same again it was so
            self.ask(time.monotonic())
            return
        self.told_at = time.monotonic()
        over = "the job has stalled"
        fatal = [stall for stall in stalls if stall.lacking and stall.seconds >= self.limits.shutdown]
        if deadlocked:
            over = "no rank can go on, since each waits for what others have not called: the job has stalled"
            fatal = stalls = diagnosis.diagnose(reports, 0.0)
        self.show(reports, stalls)
        if fatal:
            text = f"{over}, and is ended.\n{diagnosis.letter(reports, fatal)}"
            for other in range(self.size):
                if other != self.rank:
                    self.mail.post(End(text), other)
            self.end(text)

    def show(self, reports: Sequence[Report | None], stalls: Sequence[diagnosis.Stall]) -> None:
        """Print the table. Quickly, though the main thread may be in an endless loop: rich has many modules to load,
        and each file read gives up Python's lock, which is had back after an interval."""
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            with contextlib.suppress(Exception):  # nobody reads our stderr, or it is something of the user's
                self.tell(reports, stalls)
        finally:
            sys.setswitchinterval(interval)

    def end(self, text: str) -> None:
        """Fail what is pending here, now and later. A rank that waits for nothing says so itself."""
        if self.ended_at is not None:
            return
        self.ended_at, self.text = time.monotonic(), text
        waiting = any(lane.queue.pending for lane in self.lanes())
        for lane in self.lanes():
            lane.close(StallError(text))
        if not waiting:
            with contextlib.suppress(Exception):
                print(f"hvdlite: rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def last_resort(self, now: float) -> None:
        """End the process if its caller sits in a transfer that nothing can interrupt."""
        if now - (self.ended_at or now) > GRACE and any(lane.turn.lent for lane in self.lanes()):
            self.give_up(self.text)


def patient(request: Request[Any]) -> bool:
    """Whether it waits for others to finish their work, however long that takes: to shut down, or to join."""
    return request.is_a(LEAVE) or request.is_a(JOIN)


def watch(
    world: Communicator, lanes: Callable[[], list[Lane]], check: float, shutdown: float,
    give_up: Callable[[str], object],
) -> StallWatch | None:
    """A running watch over the lanes; None where there is nobody to wait for, or rank 0 wants none. Collective.

    check, shutdown: rank 0's count. A shutdown time below the check time brings the check forward.
    give_up: ends the job, and says why.
    """
    check, shutdown = world.allgather_object((check, shutdown))[0]
    if world.size == 1 or not check:
        return None
    shutdown = shutdown or float("inf")
    limits = Limits(min(check, shutdown), shutdown)
    watch = StallWatch(world.mail(), world.rank, world.size, lanes, limits, give_up)
    watch.start()
    return watch
