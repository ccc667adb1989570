"""The stall watch reports which collectives wait for which ranks, for how long, and at which line each rank is.

Each rank has a thread that wakes a few times per second, looks at the pending requests of its lanes, and fetches
letters. The ranks write letters only after a rank has waited for too long:

    the rank that has waited  --Alarm-->   the lowest rank that answers, beginning with rank 0
    that rank                 --Heard-->   back. Without it, the waiting rank alarms the next rank, at last itself
    that rank                 --Ask-->     all ranks; a rank that does not answer in time is "no answer"
                              --Answer-->  back: the pending requests, and the position of the main thread
    it prints the report. If the limit for shutdown has passed, or no rank can go on, it ends the job:
                              --End-->     all ranks: all pending requests fail

So a rank answers even if it never enters a collective, or loops for ever: its thread answers. Letters travel over MPI
on a communicator of their own. That reaches every rank of every host without a port, an address, or a firewall rule.
Rejected: sockets, which need all three; a thread that blocks in a receive, since MPI waits by spinning. A look takes
about 150 us, five times per second or less: below 0.1 % of a core.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvdlite.config import StallLimits
from hvdlite.errors import StallError
from hvdlite.gpu_streams import adopt_gpu
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request, T
from hvdlite.observers import diagnosis
from hvdlite.observers.board import Board
from hvdlite.observers.diagnosis import Identity, Report, Stall
from hvdlite.observers.inquiry import Inquiries, Inquiry
from hvdlite.observers.letters import Alarm, Answer, Ask, End, Heard
from hvdlite.observers.patience import BUSY_TICK, Limits, Patience
from hvdlite.transports import Communicator, Mail

SLACK = 0.5  # seconds for a thread that must first get a core, and Python's lock
GRACE = 2.0  # seconds between the errors of all pending calls and the end of a process that cannot raise its error


@dataclass
class Appeal:
    """An alarm that rank `judge` has not answered yet."""

    judge: int
    deadline: float


class Ending:
    """How this rank ends its job.

    Attributes:
        rank: This rank.
        lanes: Returns the lanes that exist now.
        give_up: Ends the process and the job, and prints the reason.
        text: The error of all pending calls; "" before the end.
        begun: When the end began; None before.
    """

    def __init__(self, rank: int, lanes: Callable[[], list[Lane]], give_up: Callable[[str], object]) -> None:
        self.rank = rank
        self.lanes = lanes
        self.give_up = give_up
        self.text = ""
        self.begun: float | None = None

    def begin(self, text: str) -> None:
        """Fail all pending and later requests. A rank without a pending request prints the error."""
        if self.begun is not None:
            return
        self.begun, self.text = time.monotonic(), text
        waiting = any(lane.queue.pending for lane in self.lanes())
        for lane in self.lanes():
            lane.close(StallError(text))
        if not waiting:
            with contextlib.suppress(Exception):
                print(f"hvdlite: rank {self.rank}: {text}", file=sys.stderr, flush=True)

    def last_resort(self, now: float) -> None:
        """End the process if its caller is in a transfer that cannot be interrupted."""
        if now - (self.begun or now) > GRACE and any(lane.turn.lent for lane in self.lanes()):
            self.give_up(self.text)


class StallWatch:
    """Watches a job's lanes from `start` until `stop`, in a thread of its own.

    Attributes:
        mail: Letters among all ranks.
        rank: This rank.
        limits: The limits of waiting.
        board: This rank's pending requests.
        patience: When to ask and to report.
        inquiries: This rank's inquiries.
        appeal: This rank's alarm that no rank has answered; None if there is none.
        suspected: All ranks' waits when no rank seemed able to go on.
        ending: The end of the job.
        tell: Prints a report.
        stopping: Set when the thread is to end.
        thread: The thread.
    """

    def __init__(
        self, mail: Mail, rank: int, size: int, lanes: Callable[[], list[Lane]], limits: Limits,
        give_up: Callable[[str], object],
    ) -> None:  # fmt: skip
        """
        Args:
            mail: Letters among all ranks.
            rank: This rank.
            size: The number of ranks.
            lanes: Returns the lanes that exist now.
            limits: The limits of waiting.
            give_up: Ends the process and the job, and prints the reason.
        """
        self.mail = mail
        self.rank = rank
        self.limits = limits
        self.board = Board(lanes, limits.tick)
        self.patience = Patience(limits)
        self.inquiries = Inquiries(mail, rank, size, limits.tick + SLACK)
        self.appeal: Appeal | None = None
        self.suspected: list[set[Identity]] = []
        self.ending = Ending(rank, lanes, give_up)
        self.tell: Callable[[Sequence[Report | None], Sequence[Stall]], None] = diagnosis.show
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.main, name="hvdlite-stall-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.thread.start()

    def stop(self) -> None:
        """End the thread. Collective, when no rank has a pending request; waits for all ranks."""
        self.stopping.set()
        self.thread.join()
        self.mail.close()

    def main(self) -> None:
        """The thread."""
        while not self.stopping.wait(self.pause()):
            self.board.note_suspension(time.monotonic())
            adopt_gpu()
            try:
                while (letter := self.mail.fetch()) is not None:
                    self.read(*letter)
                self.look(time.monotonic())
                self.board.note_look()
            except Exception:
                logging.getLogger("hvdlite").exception("the stall watch of rank %d has ended", self.rank)
                return

    def pause(self) -> float:
        """Seconds until the next look."""
        if self.inquiries.open or self.appeal:
            return BUSY_TICK
        return self.patience.pause(self.board.longest_wait())

    def explain(self, lane: Lane, request: Request[T]) -> str:
        """Return which ranks a pending request waits for, and where they are; "" if no answer comes in time.

        Asks all ranks. Waits a second or two. For threads of the user.
        """
        reports = self.inquiries.reports(4 * (self.limits.tick + SLACK))
        found = [
            stall for stall in diagnosis.diagnose(reports, 0.0)
            if (stall.lane, stall.members, stall.key) == (lane.name, tuple(lane.members), request.key)
        ]  # fmt: skip
        return diagnosis.letter(reports, found) if found else ""

    # What to do next

    def look(self, now: float) -> None:
        """End the process, conclude an inquiry, or raise an alarm, if it is time."""
        if self.ending.begun is not None:
            self.ending.last_resort(now)
        elif self.inquiries.open:
            if inquiry := self.inquiries.finished(now):
                self.conclude(inquiry)
        elif self.inquiries.questions:
            self.inquiries.ask(self.board.report(), now)
        elif self.appeal:
            if now >= self.appeal.deadline:
                self.alarm(self.appeal.judge + 1, now)
        elif self.patience.is_over(self.board.longest_wait(), now):
            self.alarm(0, now)

    def alarm(self, judge: int, now: float) -> None:
        """Turn to this rank. If no lower rank than this one answers, this one asks itself."""
        waited = self.board.longest_wait()
        self.patience.note_alarm(waited, now)
        if judge >= self.rank:
            self.appeal = None
            self.inquire(waited, now)
        else:
            self.appeal = Appeal(judge, now + self.limits.tick + SLACK / 2)
            self.mail.post(Alarm(waited), judge)

    def inquire(self, waited: float, now: float) -> None:
        """Ask all ranks, if a rank's wait of `waited` seconds needs it."""
        if not self.inquiries.open and self.patience.needs_inquiry(waited, now):
            self.inquiries.ask(self.board.report(), now)

    def read(self, sender: int, letter: object) -> None:
        """Answer a letter, or do what it asks for."""
        if isinstance(letter, Ask):
            self.mail.post(Answer(letter.serial, self.board.report()), sender)
        elif isinstance(letter, Answer):
            self.inquiries.take_in(sender, letter)
        elif isinstance(letter, Alarm):
            self.mail.post(Heard(), sender)
            self.inquire(letter.seconds, time.monotonic())
        elif isinstance(letter, Heard):
            self.appeal = None
        elif isinstance(letter, End):
            self.ending.begin(letter.text)

    # The verdict

    def conclude(self, inquiry: Inquiry) -> None:
        """Judge the reports of all ranks: print them, and end the job if it must end."""
        reports = [inquiry.reports.get(rank) for rank in range(self.inquiries.size)]
        self.inquiries.answer(reports)
        stalls = diagnosis.diagnose(reports, self.limits.check)
        if not stalls:
            return  # the wait has ended meanwhile
        deadlocked = diagnosis.deadlocked(reports, time.monotonic() - inquiry.begun)
        if deadlocked and (waits := diagnosis.identities(reports)) != self.suspected:
            self.suspected = waits  # the reports are not of one moment: it is true if all ranks report the same again
            self.inquiries.ask(self.board.report(), time.monotonic())
            return
        self.patience.note_report(time.monotonic())
        over = "the job has stalled"
        fatal = [stall for stall in stalls if stall.lacking and stall.seconds >= self.limits.shutdown]
        if deadlocked:
            over = "no rank can go on, since each waits for what others have not called: the job has stalled"
            fatal = stalls = diagnosis.diagnose(reports, 0.0)
        self.show(reports, stalls)
        if fatal:
            text = f"{over}, and is ended. [HVD902]\n{diagnosis.letter(reports, fatal)}"
            self.inquiries.post(End(text))
            self.ending.begin(text)

    def show(self, reports: Sequence[Report | None], stalls: Sequence[Stall]) -> None:
        """Print the report.

        The main thread may be in an endless loop, and takes Python's lock for an interval after each file that this
        thread reads. Printing loads the many modules of `rich`, so the interval is short meanwhile.
        """
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            with contextlib.suppress(Exception):  # stderr may be closed, or an object of the user's
                self.tell(reports, stalls)
        finally:
            sys.setswitchinterval(interval)


def watch(
    world: Communicator, lanes: Callable[[], list[Lane]], given: StallLimits, give_up: Callable[[str], object]
) -> StallWatch | None:
    """A running watch; None if the job has one rank, or rank 0 wants none. Collective.

    Args:
        world: The communicator of all ranks.
        lanes: Returns the lanes that exist now.
        given: This rank's settings. All ranks use those of rank 0. A shorter limit for shutdown replaces that for
            reports.
        give_up: Ends the process and the job, and prints the reason.
    """
    check, shutdown = world.allgather_object(tuple(given))[0]
    if world.size == 1 or not check:
        return None
    shutdown = shutdown or float("inf")
    limits = Limits(min(check, shutdown), shutdown)
    watch = StallWatch(world.mail(), world.rank, world.size, lanes, limits, give_up)
    watch.start()
    return watch
