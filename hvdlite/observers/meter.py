"""The meter: where this rank's time goes, for the summary of a job.

A thread of the user computes, or it waits inside hvdlite. While it waits, an operation is under way, or other ranks
have not called yet. Meanwhile the lane's thread may communicate, which costs the user nothing:

    user's thread    compute ......... | wait ..................... | compute .........
    operation             [ hidden ]        not called yet  [ under way ]
    counted as       compute           | waiting for ranks | communication | compute

`exposed` is the time of both kinds of waits together. Lanes call the meter at each change, which takes about 0.4 us
(MEASURED.md, "The summary"). On a GPU an operation counts as done once its work is issued, so that the meter does not
see waits of the GPU itself.

`StepLog` divides the job's time into training steps. An optimizer of torch, a round of Keras' or TensorFlow's
gradients, or `hvd.count_step()` ends a step. If a script has several optimizers, a step ends when the first of them
steps again.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from statistics import median

from hvdlite.lanes.observer import Seat
from hvdlite.lanes.request import Request, T
from hvdlite.transports.sent_bytes import SentBytes

RECENT = 31  # steps of which the median time is usual
SETTLED = 5  # steps before any may count as a pause
PAUSE = 5.0  # times the usual computing time: longer is a pause, not a step
LEAST_PAUSE = 0.05  # seconds; a busy machine interrupts a short step for longer than five times its length


@dataclass(frozen=True)
class Spent:
    """Seconds of this rank, and the bytes that it has sent in this time.

    Attributes:
        exposed: In which a thread of the user has waited in hvdlite.
        waiting: The part of these in which no operation was under way, because other ranks had not called.
        under_way: In which an operation was under way, whether a thread of the user waited or not.
        network: The bytes to ranks on other hosts.
        memory: The bytes to ranks on this host.
    """

    exposed: float = 0.0
    waiting: float = 0.0
    under_way: float = 0.0
    network: int = 0
    memory: int = 0

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.exposed + other.exposed, self.waiting + other.waiting, self.under_way + other.under_way,
            self.network + other.network, self.memory + other.memory,
        )  # fmt: skip

    def __sub__(self, other: Spent) -> Spent:
        return Spent(
            self.exposed - other.exposed, self.waiting - other.waiting, self.under_way - other.under_way,
            self.network - other.network, self.memory - other.memory,
        )  # fmt: skip


class Meter:
    """Measures this rank. An observer of all lanes, and called by threads that wait for letters. For any thread.

    It keeps sets, not counts. If a signal handler raises, the end of a wait or of an operation may be lost. The end of
    that thread's next wait, or of that lane's next operation, then corrects the set.

    Attributes:
        sent: Counts the bytes that this rank sends.
        lock: Protects the other attributes. A signal handler may call while its thread holds the lock.
        waits: The user's threads that wait in hvdlite.
        operations: The lanes with an operation under way, by id() of their seats. A lane runs one at a time.
        changed: The time of the last change of these two.
        exposed, waiting, under_way: The sums up to that time; see `Spent`.
    """

    def __init__(self, sent: SentBytes) -> None:
        self.sent = sent
        self.lock = threading.RLock()
        self.waits: set[int] = set()
        self.operations: set[int] = set()
        self.changed = time.monotonic()
        self.exposed, self.waiting, self.under_way = 0.0, 0.0, 0.0

    @property
    def spent(self) -> Spent:
        """The sums up to now."""
        with self.lock:
            self.pass_time()
            return Spent(self.exposed, self.waiting, self.under_way, self.sent.network, self.sent.memory)

    def pass_time(self) -> None:
        """Add the time since the last change to the sums. The caller holds the lock."""
        now = time.monotonic()
        passed, self.changed = now - self.changed, now
        if self.operations:
            self.under_way += passed
        if self.waits:
            self.exposed += passed
            if not self.operations:
                self.waiting += passed

    def go_on_in_child(self) -> None:
        """Make a new lock in a forked child, in which no thread waits and no operation is under way."""
        self.lock = threading.RLock()
        self.waits.clear()
        self.operations.clear()

    # Called by lanes: see lanes.observer

    def wait_begins(self) -> None:
        """A thread of the user begins to wait."""
        with self.lock:
            self.pass_time()
            self.waits.add(threading.get_ident())

    def wait_ends(self) -> None:
        """That thread goes on."""
        with self.lock:
            self.pass_time()
            self.waits.discard(threading.get_ident())

    def queued(self, seat: Seat, request: Request[T]) -> None:
        """This rank has called the request."""

    def agreed(self, seat: Seat, request: Request[T]) -> None:
        """All ranks have called the request, and its work begins."""
        with self.lock:
            self.pass_time()
            self.operations.add(id(seat))

    def done(self, seat: Seat, request: Request[T]) -> None:
        """The request has its result, or its error."""
        with self.lock:
            self.pass_time()
            self.operations.discard(id(seat))


@dataclass(frozen=True)
class Stretch:
    """A number of steps, or of pauses.

    Attributes:
        number: How many.
        seconds: Their time.
        spent: The part of it in which this rank has waited or communicated.
    """

    number: int = 0
    seconds: float = 0.0
    spent: Spent = Spent()

    def __add__(self, other: Stretch) -> Stretch:
        return Stretch(self.number + other.number, self.seconds + other.seconds, self.spent + other.spent)

    def __sub__(self, other: Stretch) -> Stretch:
        return Stretch(self.number - other.number, self.seconds - other.seconds, self.spent - other.spent)


class StepLog:
    """The training steps of this rank.

    The time from one step to the next counts as a pause if this rank has computed for much longer than usual: for an
    evaluation, a checkpoint, or the start of an epoch.

    Attributes:
        meter: Measures this rank.
        began: When `hvd.init()` began.
        ready: When it ended.
        first: When the first step ended; None before that.
        steps: The steps after the first one.
        pauses: The pauses.
        samples: The samples that the user has counted.
        seen: How often each has stepped since the last step ended. The one that ended it is there, too.
        last: When that step began, and what had been spent then.
        recent: The computing times of the last intervals.
    """

    def __init__(self, meter: Meter, began: float) -> None:
        self.meter = meter
        self.began, self.ready = began, began
        self.first: float | None = None
        self.steps, self.pauses = Stretch(), Stretch()
        self.samples = 0
        self.seen = Counter[int]()
        self.last = self.began, Spent()
        self.recent: deque[float] = deque(maxlen=RECENT)

    @property
    def number(self) -> int:
        """The number of steps."""
        return self.steps.number + self.pauses.number + (self.first is not None)

    def start(self) -> None:
        """`hvd.init()` ends."""
        self.ready = time.monotonic()

    def count_samples(self, samples: int) -> None:
        """This rank has trained on so many more samples."""
        self.samples += samples

    def end(self, who: int) -> None:
        """An optimizer has stepped, or a round of gradients has ended.

        Args:
            who: Tells several of them apart.
        """
        known = who in self.seen
        self.seen[who] += 1
        if self.first is not None and not known:
            return
        number = max(self.seen.values())  # 2 where a new optimizer takes over: its first step could be a companion's
        self.seen = Counter({who: 0})
        (before, spent_before), self.last = self.last, (time.monotonic(), self.meter.spent)
        now, spent = self.last
        if self.first is None:
            self.first = now
            return
        interval = Stretch(number, now - before, spent - spent_before)
        if self.is_pause((interval.seconds - interval.spent.exposed) / number):
            self.pauses += interval
        else:
            self.steps += interval

    def is_pause(self, computed: float) -> bool:
        """Whether an interval with so many seconds of computing is a pause."""
        usual = median(self.recent) if len(self.recent) >= SETTLED else computed
        self.recent.append(computed)
        return computed > max(PAUSE * usual, LEAST_PAUSE)
