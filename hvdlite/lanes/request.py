"""One collective operation on its way through a lane: the request, the promise of its result, and who waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.lanes import calls, swallowed
from hvdlite.lanes.signature import BITS, JOIN, LEAVE, Round, Signature
from hvdlite.lanes.workplace import Workplace

T = TypeVar("T")
StandIn: TypeAlias = Callable[[Workplace], None]
"""What a rank that has joined does instead of an operation's work. Picklable."""


class Changed(threading.Condition):
    """A lane's lock, notified when a result is there.

    Attributes:
        lock: The lock itself; taking it by this name is quicker.
        called: The same lock, notified when the lane's thread has something to do. With one condition for both, each
            result would wake that thread, and synchronous calls would take twice as long.
        waiting: The threads that wait, and for which handle.
    """

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        """Start anew in a forked child, where the threads that held the lock or waited do not exist."""
        self.lock = threading.RLock()
        super().__init__(self.lock)
        self.called = threading.Condition(self.lock)
        self.waiting: list[tuple[int, Handle[Any]]] = []

    def waiters(self) -> set[int]:
        """Return the threads that wait for an unfinished handle; not those that are about to wake up."""
        return {thread for thread, handle in list(self.waiting) if not handle.done}


class Handle(Generic[T]):
    """The promise of a request's result.

    Attributes:
        done: Whether `wait` would return (or raise) at once.
        ending: A mark after the request's work on the GPU.
    """

    def __init__(self, changed: Changed) -> None:
        self.changed = changed
        self.done = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.ending = NOTHING_PENDING

    def wait(self) -> T:
        """Block until the request is done and return its result.

        On a GPU this returns when all work is issued; the caller's streams then run after that work.

        Raises:
            BaseException: The request's error, again at each call.
        """
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
        return self.result  # type: ignore[return-value]  # there once it is done without an error

    def finish(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Set the result or the error. The caller holds the lane's lock."""
        self.result, self.error, self.done = result, error, True
        if self.changed.waiting:
            self.changed.notify_all()


class Identity:
    """Which operation a request is, and which round of it.

    Attributes:
        first: The signature when the request was made.
        round: The round now: the first signature's, or that of `turn_to`.
        key: The signature's key.
        digest: The digest of the signature in this round.
        timeless: The digest without the round's numbers.
        called: The user's call that the operation is a part of; empty where it is one by itself.
    """

    def __init__(self, first: Signature) -> None:
        self.first, self.round, self.called = first, first.round, calls.current()
        self.key, self.digest = first.key, first.digest()
        self.timeless = self.digest - (first.round.number if isinstance(first.round, Round) else 0)

    @property
    def signature(self) -> Signature:
        return self.first._replace(round=self.round)

    def title(self, user: str = "") -> str:
        """The name in messages. user: the optimizer or tape that the lane belongs to."""
        if self.first is LEAVE:
            return "hvd.shutdown()"
        return "hvd.join()" if self.first is JOIN else calls.title(self.first.kind, self.first.name, self.called, user)

    def turn_to(self, round: Round) -> None:
        """Go to a round with other numbers but the same words."""
        digest = (self.timeless + round.number) & BITS
        self.round, self.digest = round, digest  # both, or, where a signal's handler raises, neither


class Request(Generic[T]):
    """One collective operation: the signature to agree on, and the work that follows.

    Attributes:
        work: Runs on the lane once all ranks have agreed. Its return value becomes the handle's result.
        ready: Waited for before the roll call, so that no rank's GPU still writes what `work` reads.
        flag: A small number; after the roll call the largest of all ranks'.
        count: A number of at most 62 bits, which may differ between ranks.
        equal_counts: After the roll call: whether all ranks gave the same count. False in a job of one rank.
        stand_in: Makes what a rank that has joined does instead of `work`. None: impossible while a rank has joined.
        handle: There once the request is queued.
        begun: Whether the request is under way, so that other ranks may know of it.
        queued: When this rank queued it, in seconds of `time.monotonic()`; 0.0 before.
        agreed: When all ranks had called it and the work began; 0.0 before.
    """

    handle: Handle[T]

    def __init__(
        self,
        signature: Signature,
        work: Callable[[Workplace], T],
        ready: Mark = NOTHING_PENDING,
        flag: int = 0,
        count: int = 0,
        stand_in: Callable[[], StandIn] | None = None,
    ) -> None:
        self.identity = Identity(signature)
        self.work, self.ready, self.stand_in = work, ready, stand_in
        self.flag, self.count, self.equal_counts = flag, count, False
        self.begun = False
        self.queued, self.agreed = 0.0, 0.0

    @property
    def signature(self) -> Signature:
        return self.identity.signature

    @property
    def key(self) -> str:
        return self.identity.key

    def title(self, user: str = "") -> str:
        """The request's name in messages. user: the optimizer or tape that the lane belongs to."""
        return self.identity.title(user)

    def is_a(self, signature: Signature) -> bool:
        """Whether the request was made with this signature: LEAVE or JOIN."""
        return self.identity.first is signature

    def again(self, round: Round, flag: int = 0) -> Request[T]:
        """Use this object for the same operation in another round: a new one costs some 30 us (MEASURED.md).

        Not while it is pending. Nobody else may hold the handle of the previous round.
        """
        self.identity.turn_to(round)
        self.flag, self.begun, self.agreed = flag, False, 0.0
        return self

    def call(self, user: str = "") -> Call:
        """The request as other ranks see it. user: as for `title`."""
        plain = self.is_a(LEAVE) or self.is_a(JOIN)
        known = self.signature if plain else self.signature._replace(called=self.title(user))
        return Call(known, self.flag, self.count, self.stand_in() if self.stand_in else None)


@dataclass(frozen=True)
class Call:
    """A request as other ranks see it when a roll call has found different ones. Picklable."""

    signature: Signature
    flag: int
    count: int
    stand_in: StandIn | None


def visible(queue: Iterable[Request[Any]]) -> list[Request[Any]]:
    """The requests that other ranks may see: none after a JOIN, and a JOIN only when no request is before it."""
    found = list(queue)
    place = next((place for place, request in enumerate(found) if request.signature == JOIN), len(found))
    return found[: max(place, 1)]
