"""One collective operation on its way through a lane: the request, the promise of its result, and who waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.lanes import calls, swallowed
from hvdlite.lanes.signature import BITS, JOIN, LEAVE, Round, Signature

if TYPE_CHECKING:
    from hvdlite.lanes.lane import Lane


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
