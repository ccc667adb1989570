"""What ranks must agree on before they communicate, and what is done once they have.

A `Signature` is everything that must be equal on all ranks: kind, name, dtype, shape, operation, factors, root,
placement. Its digest is what the roll call compares; the signature itself is exchanged only when digests differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvdlite import calls, swallowed
from hvdlite.arrays import NOTHING_PENDING, Mark

if TYPE_CHECKING:
    from hvdlite.engine import Lane


Facts: TypeAlias = tuple[tuple[str, Any], ...]
"""Pairs of what and its value, in a fixed order."""
UNKNOWN = "unknown"
"""The value of a fact that a rank cannot tell: it agrees with the others', whatever they know."""
BITS = (1 << 62) - 1


def digest(text: str) -> int:
    """62 bits that are equal in all processes for equal texts. (Python's hash() differs per process.)"""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & BITS


@lru_cache(maxsize=1024)
def digest_of_facts(kind: str, facts: Facts) -> int:
    """Of what is the same call after call, while names and rounds change: writing it out takes longest."""
    return digest(f"{kind} {facts}")


@lru_cache(maxsize=1024)
def digest_of_name(name: str, words: str) -> int:
    return digest(f"{name}\n{words}")


ODD = [digest(f"number {i}") | 1 for i in range(4)]
"""What a round's numbers are multiplied by, so that no two of them add up to the same."""


class Changed(threading.Condition):
    """A lane's lock, notified of results.

    lock: itself, quicker to take by this name. called: the same lock, notified of what the lane's thread has to do. If
    that woke at results, too, each would cost a switch between threads, which doubled the time of synchronous calls
    once a lane had a thread. waiting: the threads that wait, and for what.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """As new: in a forked child, where the threads that held the lock or waited do not exist."""
        self.lock = threading.RLock()
        super().__init__(self.lock)
        self.called = threading.Condition(self.lock)
        self.waiting: list[tuple[int, Handle]] = []

    def waiters(self) -> set[int]:
        """The threads that wait for what is not done; not those that are about to wake up."""
        return {thread for thread, handle in list(self.waiting) if not handle.done}


class Round(NamedTuple):
    """Which backward a request is of: words with a {} for each of up to four numbers. Only these change: to write them
    out and digest them took 19 us behind a training step, whose caches are cold."""

    words: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return self.words.format(*self.numbers)

    @property
    def number(self) -> int:
        """What they add to a digest."""
        return sum(map(mul, self.numbers, ODD))


class Signature(NamedTuple):
    """kind: 'allreduce', ...; name: the tensor's or plan's; round: what tells it from others of that name. called: what
    the user called on the rank that made it, for messages; ranks need not agree on it."""

    kind: str
    name: str
    facts: Facts = ()
    round: Round | str = ""
    called: str = ""

    def digest(self) -> int:
        """Equal in all processes for equal signatures, and else different but for a chance of 2^-62."""
        words, number = (self.round.words, self.round.number) if isinstance(self.round, Round) else (self.round, 0)
        return (digest_of_facts(self.kind, self.facts) + digest_of_name(self.name, words) + number) & BITS

    @property
    def key(self) -> str:
        """What ranks match it by."""
        return f"{self.kind} '{self.name}'"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.called or calls.title(self.kind, self.name)


UNEVEN = (
    "Where ranks have different numbers of batches, call hvd.join() after the loop, or drop the remainder "
    "(drop_last=True, dataset.take(n))."
)
"""The cure where one rank is in a backward and another has left the loop."""
END = "end"
"""The kind of what a rank calls in place of a step's first bucket when it has ended an epoch of fit()."""
LEAVE = Signature("shutdown", "all")
JOIN = Signature("join", "all")
"""Runs when all ranks have joined; until then a rank whose queue it heads takes part in the others' requests."""


class Handle:
    """The promise of a request's result."""

    def __init__(self, changed: Changed) -> None:
        self.changed = changed
        self.done = False
        """Whether `wait` would return (or raise) at once."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.ending = NOTHING_PENDING
        """Behind the request's work on the GPU."""

    def wait(self) -> Any:
        """Block until done; on a GPU until all is issued, behind which the caller's streams then go on. Returns the
        result, or raises the request's error (again at each call)."""
        if not self.done:
            with self.changed:
                mine = threading.get_ident(), self
                self.changed.waiting.append(mine)
                try:
                    self.changed.wait_for(lambda: self.done)
                finally:
                    self.changed.waiting.remove(mine)
        if self.error is not None:
            swallowed.raised(self.error)
            raise self.error
        if self.ending is not NOTHING_PENDING:
            self.ending.precede()
        return self.result

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Called with the lane's lock held."""
        self.result, self.error, self.done = result, error, True
        if self.changed.waiting:
            self.changed.notify_all()


@dataclass(eq=False)
class Request:
    """One collective operation: the signature to agree on, and the work that follows."""

    first: Signature
    """Its signature when it was made: see `again`."""
    work: Callable[[Lane], Any]
    """Runs on the lane once all ranks have agreed; its return value becomes the handle's result."""
    ready: Mark = NOTHING_PENDING
    """Waited for before the roll call, so that at its end no rank's GPU still writes what `work` reads."""
    flag: int = 0
    """Any small number; after the roll call the largest of all ranks'."""
    count: int = 0
    """Any number of at most 62 bits, which may differ between ranks."""
    alike: bool = False
    """After the roll call: all ranks gave the same count. False where nobody asked (a job of one rank)."""
    stand_in: Callable[[], Callable[[Lane], None]] | None = None
    """Makes what a rank that has joined does instead of `work`, picklable. None: not possible while one has joined."""
    called: str = field(default_factory=calls.current)
    """The user's call, of which it is a part; empty where it is one by itself."""
    handle: Handle = field(init=False)
    """There once it is queued."""
    round: Round | str = field(init=False)
    key: str = field(init=False)
    """The signature's, as `digest` is."""
    digest: int = field(init=False)
    timeless: int = field(init=False)
    """The digest without the round's numbers."""
    begun: bool = False
    """Whether it is under way, so that other ranks may know of it."""
    queued: float = 0.0
    """When it was queued (time.monotonic()), for whoever looks on; 0.0: not yet."""
    agreed: float = 0.0
    """When all ranks had called it and the work began; 0.0: not yet."""

    def __post_init__(self) -> None:
        self.round, self.key, self.digest = self.first.round, self.first.key, self.first.digest()
        self.timeless = self.digest - (self.round.number if isinstance(self.round, Round) else 0)

    @property
    def signature(self) -> Signature:
        return self.first._replace(round=self.round)

    def again(self, round: Round, flag: int = 0) -> Request:
        """The same operation, in a round with other numbers but the same words; this object is used again, since a new
        one takes 30 us behind a training step. Not while it is pending."""
        digest = (self.timeless + round.number) & BITS
        self.round, self.digest = round, digest  # both, or, where a signal's handler raises, neither
        self.flag, self.begun, self.agreed = flag, False, 0.0
        return self

    def title(self, user: str = "") -> str:
        """Its name in messages. user: the optimizer or tape that its lane belongs to."""
        if self.first is LEAVE:
            return "hvd.shutdown()"
        return "hvd.join()" if self.first is JOIN else calls.title(self.first.kind, self.first.name, self.called, user)

    def call(self, user: str = "") -> Call:
        """user: as for `title`."""
        known = self.signature if self.first in (LEAVE, JOIN) else self.signature._replace(called=self.title(user))
        return Call(known, self.flag, self.count, self.stand_in() if self.stand_in else None)


@dataclass(frozen=True)
class Call:
    """A request as other ranks are told of it, when the roll call has found different ones. Picklable."""

    signature: Signature
    flag: int
    count: int
    stand_in: Callable[[Lane], None] | None


def visible(queue: Iterable[Request]) -> list[Request]:
    """What other ranks are told of: nothing behind a JOIN, and of a JOIN only when nothing is before it."""
    found = list(queue)
    place = next((place for place, request in enumerate(found) if request.signature == JOIN), len(found))
    return found[: max(place, 1)]
