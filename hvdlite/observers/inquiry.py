"""An inquiry collects the reports of all ranks for one stall watch.

It ends when all ranks have answered, or after a deadline. A report says what a rank waits for and where its main thread
is. A watch has one inquiry at a time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdlite.observers.diagnosis import Report
from hvdlite.observers.letters import Answer, Ask
from hvdlite.transports import Mail


@dataclass
class Inquiry:
    """The reports that one rank has asked for.

    Attributes:
        serial: Its number among this rank's inquiries.
        begun: When it began.
        deadline: When missing reports are no longer waited for.
        reports: The reports so far, by rank.
    """

    serial: int
    begun: float
    deadline: float
    reports: dict[int, Report] = field(default_factory=dict)


class Question:
    """A thread of the user waits for the reports of all ranks.

    Attributes:
        answered: Set when the reports are there.
        reports: By rank; None for no answer.
    """

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.reports: Sequence[Report | None] = ()

    def answer(self, reports: Sequence[Report | None]) -> None:
        """Let the thread go on with these reports."""
        self.reports = reports
        self.answered.set()


class Inquiries:
    """The inquiries of one rank, at most one at a time.

    Attributes:
        mail: Letters among all ranks.
        rank: This rank.
        size: The number of ranks.
        patience: Seconds to wait for reports.
        serial: The number of inquiries so far.
        open: The present inquiry; None if there is none.
        questions: The questions that the end of an inquiry answers.
    """

    def __init__(self, mail: Mail, rank: int, size: int, patience: float) -> None:
        self.mail = mail
        self.rank = rank
        self.size = size
        self.patience = patience
        self.serial = 0
        self.open: Inquiry | None = None
        self.questions: deque[Question] = deque()

    def ask(self, own: Report, now: float) -> None:
        """Ask all other ranks. own: this rank's report."""
        self.serial += 1
        self.open = Inquiry(self.serial, now, now + self.patience, {self.rank: own})
        self.post(Ask(self.serial))

    def take_in(self, sender: int, answer: Answer) -> None:
        """Add a report to the inquiry that it answers."""
        if self.open and answer.serial == self.open.serial:
            self.open.reports[sender] = answer.report

    def finished(self, now: float) -> Inquiry | None:
        """The present inquiry, which is over then; None while reports are missing and time is left."""
        found = self.open
        if found is None or (len(found.reports) < self.size and now < found.deadline):
            return None
        self.open = None
        return found

    def reports(self, seconds: float) -> Sequence[Report | None]:
        """The reports of all ranks, in at most so many seconds; an empty list if they do not come in time.

        For threads of the user. The stall watch's thread asks, and calls `answer`.
        """
        question = Question()
        self.questions.append(question)
        question.answered.wait(seconds)
        return question.reports

    def answer(self, reports: Sequence[Report | None]) -> None:
        """Answer all questions with these reports."""
        while self.questions:
            self.questions.popleft().answer(reports)

    def post(self, letter: object) -> None:
        """Send a letter to all other ranks."""
        for other in range(self.size):
            if other != self.rank:
                self.mail.post(letter, other)
