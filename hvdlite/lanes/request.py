"""A request is one collective operation on a lane: a signature that ranks compare, and the work that follows.

`ops/`, `gradients/` and `job/` make requests. A request's handle gives callers the result. `Changed` is a lane's lock,
on which callers wait. `Call` is what other ranks see of a request in common rounds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from hvdlite.gpu_streams import NOTHING_PENDING, Mark
from hvdlite.lanes import calls, swallowed
from hvdlite.lanes.signature import BITS, JOIN, LEAVE, Round, Signature
from hvdlite.lanes.workplace import Workplace

T = TypeVar("T")
StandIn: TypeAlias = Callable[[Workplace], None]
"""A picklable function that a joined rank runs instead of an operation's work."""


class WaitObserver(Protocol):
    """Records the waits of the user's threads inside hvdlite. Several threads may wait at once."""

    def wait_begins(self) -> None:
        """A thread of the user begins to wait for a result, or runs a request itself."""
        ...

    def wait_ends(self) -> None:
        """That thread goes on."""
        ...


class Changed(threading.Condition):
    """A lane's lock and condition, notified when a request is done.

    Attributes:
        observers: Notified of waits. The list may change while the lane lives.
        lock: The lock itself, which is quicker to take than the condition.
        called: A second condition of the same lock, notified when the lane's thread has something to do. If there were
            only one condition, each result would wake that thread, and synchronous calls would take twice as long.
        waiting: Pairs of a waiting thread and the handle that it waits for.
    """

    def __init__(self, observers: Sequence[WaitObserver] = ()) -> None:
        self.observers = observers
        self.renew()

    def orphan(self) -> None:
        """Make a new lock in a forked child, and drop the observers."""
        self.observers = ()
        self.renew()

    def wait_begins(self) -> None:
        """A thread of the user begins to wait for the lane."""
        for observer in self.observers:
            observer.wait_begins()

    def wait_ends(self) -> None:
        """That thread goes on."""
        for observer in self.observers:
            observer.wait_ends()

    def renew(self) -> None:
        """Make a new lock. A forked child needs one, because the threads that held the old one do not exist there."""
        self.lock = threading.RLock()
        super().__init__(self.lock)
        self.called = threading.Condition(self.lock)
        self.waiting: list[tuple[int, Handle[Any]]] = []

    def waiters(self) -> set[int]:
        """The threads that wait for an unfinished handle."""
        return {thread for thread, handle in list(self.waiting) if not handle.done}


class Handle(Generic[T]):
    """The promise of a request's result.

    Attributes:
        done: Whether `wait` would return (or raise) at once.
        ending: A mark after the request's work on the GPU.
        when_done: Functions to call when the request is done.
    """

    def __init__(self, changed: Changed) -> None:
        self.changed = changed
        self.done = False
        self.when_done: list[Callable[[], object]] = []
        self.result: T | None = None
        self.error: BaseException | None = None
        self.ending = NOTHING_PENDING

    def wait(self, seconds: float | None = None) -> T:
        """Block until the request is done, and return its result.

        On a GPU this returns when all work is issued. Later work of the caller's streams runs after that work.

        Args:
            seconds: The longest wait. None: no limit.

        Raises:
            TimeoutError: The request is not done after that time. It stays pending.
            BaseException: The request's error, at each call.
        """
        if not self.done:
            with self.changed:
                mine = threading.get_ident(), self
                self.changed.waiting.append(mine)
                self.changed.wait_begins()
                try:
                    if not self.changed.wait_for(lambda: self.done, seconds):
                        raise TimeoutError
                finally:
                    self.changed.waiting.remove(mine)
                    self.changed.wait_ends()
        if self.error is not None:
            swallowed.raised(self.error)
            raise self.error
        if self.ending is not NOTHING_PENDING:
            self.ending.precede()
        return self.result  # type: ignore[return-value]  # done without an error, so it is there

    def finish(self, result: T | None = None, error: BaseException | None = None) -> None:
        """Set the result or the error. The caller holds the lane's lock."""
        self.result, self.error, self.done = result, error, True
        if self.changed.waiting:
            self.changed.notify_all()
        for function in self.when_done:
            function()

    def then(self, function: Callable[[], object]) -> None:
        """Call a function once, when the request is done, or at once if it is. Not for slow ones: it delays the lane.

        The function runs in the thread that finishes the request, which holds the lane's lock.
        """
        with self.changed.lock:
            if not self.done:
                self.when_done.append(function)
                return
        function()

    def end_at(self, ending: Mark) -> None:
        """Note that the request's work runs on a GPU, and ends at this mark."""
        self.ending = ending


class Identity:
    """The signature of a request, in its current round.

    Attributes:
        first: The signature when the request was made.
        round: The current round: the first signature's, or that of the last `turn_to`.
        key: The signature's key.
        digest: The signature's digest in the current round.
        timeless: The digest without the round's numbers.
        called: The user's call that the operation is part of; "" if it is a whole call.
    """

    def __init__(self, first: Signature) -> None:
        self.first, self.round, self.called = first, first.round, calls.current()
        self.key, self.digest = first.key, first.digest()
        self.timeless = self.digest - (first.round.number if isinstance(first.round, Round) else 0)

    @property
    def signature(self) -> Signature:
        return self.first._replace(round=self.round)

    def title(self, user: str = "") -> str:
        """The operation's name in messages. user: the optimizer or tape that the lane belongs to."""
        if self.first is LEAVE:
            return "hvd.shutdown()"
        return "hvd.join()" if self.first is JOIN else calls.title(self.first.kind, self.first.name, self.called, user)

    def turn_to(self, round: Round) -> None:
        """Change to a round with other numbers and the same words."""
        digest = (self.timeless + round.number) & BITS
        self.round, self.digest = round, digest  # in one statement: if a signal handler raises, neither changes


class Request(Generic[T]):
    """One collective operation: a signature that ranks agree on, and the work that follows.

    Attributes:
        identity: The signature, in the current round. work: Runs on the lane once all ranks have called the request.
        Its return value becomes the handle's result. ready: A mark that the lane waits for before the roll call, so
        that no rank's GPU still writes what `work` reads. flag: A small number; after the roll call the maximum of all
        ranks' flags. count: A number of at most 62 bits, which may differ between ranks. stand_in: Makes the function
        that a joined rank runs instead of `work`. None if joined ranks cannot take part. handle: Gets the result. It
        exists once the request is queued. begun: Whether the request is under way, so that other ranks may have
        received its digest. queued: The time at which this rank called it, in seconds of `time.monotonic()`; 0.0
        before. agreed: The time at which all ranks had called it; 0.0 before. phases: What the work has done in the
        last round, for observers: names and the times at which each began, and "" with the end.
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
        self.flag, self.count = flag, count
        self.begun = False
        self.queued, self.agreed = 0.0, 0.0
        self.phases: Sequence[tuple[str, float]] = ()

    def enter(self, handle: Handle[T]) -> None:
        """Note that this rank calls the request, and that `handle` gets the result."""
        self.handle, self.queued = handle, time.monotonic()

    def begin(self) -> None:
        """Note that the request is under way."""
        self.begun = True

    def agree(self, flag: int) -> None:
        """Note that all ranks have called the request. flag: the maximum of all ranks' flags."""
        self.flag, self.agreed = flag, time.monotonic()

    def show(self, phases: Sequence[tuple[str, float]]) -> None:
        """Have observers see these phases, which the work changes in each round."""
        self.phases = phases

    def move(self, ready: Mark, work: Callable[[Workplace], T]) -> None:
        """Replace the work by one that may begin once the GPU has passed `ready`."""
        self.ready, self.work = ready, work

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
        """Prepare this object for the same operation in another round. A new object takes some 30 us (MEASURED.md).

        The request must not be pending, and no other code may use the previous round's handle.
        """
        self.identity.turn_to(round)
        self.flag, self.begun, self.agreed = flag, False, 0.0
        return self

    def call(self, user: str = "") -> Call:
        """The picklable part of the request, for other ranks. user: as for `title`."""
        plain = self.is_a(LEAVE) or self.is_a(JOIN)
        known = self.signature if plain else self.signature._replace(called=self.title(user))
        return Call(known, self.flag, self.count, self.stand_in() if self.stand_in else None)


@dataclass(frozen=True)
class Call:
    """The picklable part of a request, which ranks exchange in common rounds. Attributes: as those of `Request`."""

    signature: Signature
    flag: int
    count: int
    stand_in: StandIn | None


def visible(queue: Iterable[Request[Any]]) -> list[Request[Any]]:
    """The requests that other ranks may match: those before the first JOIN, or that JOIN alone if it comes first."""
    found = list(queue)
    place = next((place for place, request in enumerate(found) if request.signature == JOIN), len(found))
    return found[: max(place, 1)]
