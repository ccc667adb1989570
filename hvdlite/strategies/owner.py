"""The owner of one slice of the parameters: it adds the workers' updates, and answers each when the bound allows it.

A worker sends an update, which is also a question: it waits for the answer, the slice's new values. Each worker is in
one state:

    COMPUTING  --update comes-->  HELD  --the update is added-->  WAITING  --answer-->  COMPUTING
                                                                  PARKED: it sends nothing for a while, and waits for
                                                                  nothing. It does not hold the others back

- Together (`clock=0`, `age=0`): updates are added when no worker computes any more, in rank order. All workers get
  the same answer: synchronous training.
- `clock=s` (SSP; Ho et al. 2013): an update is added at once. Its worker is answered when the slowest worker has made
  at most s updates fewer.
- `age=s`: an update is added while each update that is still to come can be added in time. It is in time if at most s
  updates of each worker have been added since its worker's last answer. Updates with the oldest answer go first
  (earliest deadline first), so that the bound holds strictly and never blocks all workers.
- Neither: updates are added, and answered, at once.

With `age` and in synchronous training the first owner decides, and sends the others the order in which to add
updates. Otherwise owners that get letters in different orders could hold each other's workers for ever: worker A,
answered by the first owner, waits for the second, which waits for B, which waits for the first, which waits for A.

An era begins when all ranks have the same values: at the beginning, and after `settle`, `join` or a change of the
weights from outside. Then all workers count from 0. The first letter of an era that reaches an owner begins it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b

import numpy as np

from hvdlite.arrays import Array
from hvdlite.errors import MismatchError
from hvdlite.lanes.mailbox import FIRST_KIND, LEAVE, NOTHING, Letter

UPDATE, FIRST_UPDATE, PARK, ORDER, ANSWER = range(FIRST_KIND, FIRST_KIND + 5)
"""Kinds of letters. UPDATE: a worker's delta. FIRST_UPDATE: also the values before it. PARK: the worker pauses. ORDER:
the ranks whose updates other owners must add next.
"""


@dataclass(frozen=True)
class Terms:
    """The settings of an owner.

    Attributes:
        clock: See the module; None for no such bound.
        age: See the module; None for no such bound.
        compensation: The factor of delay compensation; 0.0 for none.
        scaled: Whether an update is divided by 1 + its staleness.
    """

    clock: int | None
    age: int | None
    compensation: float = 0.0
    scaled: bool = False

    @property
    def together(self) -> bool:
        """Whether training is synchronous."""
        return self.clock == 0 or self.age == 0

    @property
    def ordered(self) -> bool:
        """Whether the first owner decides in which order all owners add updates."""
        return self.together or self.age is not None


class Phase(Enum):
    """What a worker does, as an owner sees it."""

    COMPUTING = auto()
    HELD = auto()
    WAITING = auto()
    PARKED = auto()


class Worker:
    """A worker, as an owner sees it.

    Attributes:
        rank: Its rank.
        phase: See the module.
        clock: The number of its updates in this era.
        view: The slice's version in its last answer.
        seen: The values in its last answer, if delay is compensated.
        update: Its update, and with compensation its gradient, while HELD.
        staleness: The staleness of its last update, in steps of all workers.
        gone: Whether it has left.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self.phase, self.gone = rank, Phase.COMPUTING, False
        self.clock, self.view, self.staleness = 0, 0, 0
        self.seen: Array = NOTHING
        self.update: Sequence[Array] = ()

    def begin_era(self, version: int) -> None:
        """All ranks have the same values. A worker that still waits gets them."""
        waits = self.phase in (Phase.HELD, Phase.WAITING)
        self.phase = Phase.PARKED if self.gone else Phase.WAITING if waits else Phase.COMPUTING
        self.clock, self.view = 0, version

    def begin_with(self, values: Array) -> None:
        """The era begins with these values."""
        self.seen = values

    def hold(self, clock: int, update: Sequence[Array]) -> None:
        """Its update number `clock` has come."""
        self.phase, self.clock, self.update = Phase.HELD, clock, update

    def added(self, staleness: int) -> None:
        """Its update has been added, or is void."""
        self.phase, self.staleness, self.update = Phase.WAITING, staleness, ()

    def answered(self, version: int, values: Array) -> None:
        """It gets these values."""
        self.phase, self.view, self.seen = Phase.COMPUTING, version, values

    def park(self) -> None:
        """It pauses."""
        self.phase = Phase.PARKED

    def leave(self) -> None:
        """It sends no more updates."""
        self.phase, self.gone = Phase.PARKED, True


class Owner:
    """One slice of the parameters. One thread at a time calls it; it waits for nobody.

    Attributes:
        terms: The settings.
        workers: By rank.
        values: The slice's values; empty before the first letter.
        version: The number of updates added so far.
        era: The present era; 0 before the first letter.
        base: The era in which `values` were last given from outside.
        origin: A digest of the values that were given then.
        plan: The digest of the parameters' layout; None before the first letter.
        followers: The owners that this one sends orders.
        orders: The orders that have come and are not done; None if this owner gets none.
    """

    def __init__(self, terms: Terms, workers: Sequence[int], owners: Sequence[int] = (0,), rank: int = 0) -> None:
        self.terms = terms
        self.workers = {rank: Worker(rank) for rank in workers}
        self.values: Array = NOTHING
        self.version, self.era, self.base = 0, 0, 0
        self.origin = b""
        self.plan: int | None = None
        leads = rank == owners[0]
        self.followers = owners[1:] if terms.ordered and leads else ()
        self.orders = deque[Letter]() if terms.ordered and not leads else None

    def take(self, letter: Letter) -> list[tuple[int, Letter]]:
        """Read a letter. Returns letters that may be sent now, and the ranks that get them.

        Raises:
            MismatchError: The workers have different parameters, or different values when an era begins.
        """
        worker = self.workers.get(letter.source)
        if letter.kind == ORDER and self.orders is not None:
            self.orders.append(letter)
        elif worker is None:
            return []  # a server has left
        elif letter.kind == LEAVE:
            worker.leave()
        elif letter.kind == PARK:
            if letter.era >= self.era:  # else the worker has come back since
                self.turn_to(letter.era)
                worker.park()
        else:
            self.take_update(worker, letter)
        return self.release() if self.orders is None else self.follow(self.orders)

    def take_update(self, worker: Worker, letter: Letter) -> None:
        """Keep an update until it may be added."""
        self.check_plan(letter)
        parts = 1 + bool(self.terms.compensation) + (letter.kind == FIRST_UPDATE)
        numbers = letter.body.view(np.dtype(f"f{letter.width}"))
        each = np.split(np.asarray(numbers), parts)
        if letter.kind == FIRST_UPDATE:
            self.check_origin(worker, letter, each[-1])
            self.rebase(letter.note, each[-1])
        self.turn_to(letter.era)
        if letter.era < self.era:
            worker.added(0)  # an update to values that have been replaced since
        else:
            worker.hold(letter.clock, each[:2] if self.terms.compensation else each[:1])

    def rebase(self, base: int, values: Array) -> None:
        """Start from values that were given from outside in era `base`, unless later ones are known."""
        if base > self.base:
            self.base, self.values, self.origin = base, values.copy(), hashed(values)
            self.show_beginning()

    def turn_to(self, era: int) -> None:
        """Begin an era, if it is a later one."""
        if era > self.era:
            self.era = era
            for worker in self.workers.values():
                worker.begin_era(self.version)
            self.show_beginning()

    def show_beginning(self) -> None:
        """Note that all workers have the present values."""
        if self.terms.compensation:
            values = self.values.copy()
            for worker in self.workers.values():
                worker.begin_with(values)

    def check_plan(self, letter: Letter) -> None:
        """Raise MismatchError if a worker's parameters are others than those of earlier letters."""
        self.plan = letter.plan if self.plan is None else self.plan
        if letter.plan != self.plan:
            raise MismatchError(
                f"the names, shapes or dtypes of rank {letter.source}'s parameters differ from other ranks': build the "
                "same model on all ranks [HVD204]"
            )

    def check_origin(self, worker: Worker, letter: Letter, values: Array) -> None:
        """Raise MismatchError if a worker begins with other values than another worker."""
        if letter.era == letter.note == self.base == self.era and hashed(values) != self.origin:
            raise MismatchError(
                f"rank {worker.rank} begins with other weights than another rank: give all ranks the same weights "
                "first, for example with hvd.broadcast_variables(model, root_rank=0) [HVD301]"
            )

    # Adding and answering

    def release(self) -> list[tuple[int, Letter]]:
        """Add the updates that may be added now, and answer the workers that may go on."""
        added = []
        while (worker := self.next_update()) is not None:
            self.add(worker)
            added.append(worker.rank)
        letters = self.answer([worker for worker in self.among(Phase.WAITING) if self.may_go_on(worker)])
        order = Letter(ORDER, era=self.era, body=np.array(added, np.int64))
        return letters + [(owner, order) for owner in self.followers if added]

    def follow(self, orders: deque[Letter]) -> list[tuple[int, Letter]]:
        """Do the first owner's orders, as far as the updates have come."""
        letters = self.answer(self.among(Phase.WAITING))  # void updates
        while orders and orders[0].era <= self.era:
            if orders[0].era == self.era:
                workers = [self.workers[rank] for rank in orders[0].body.view(np.int64).tolist()]
                if any(worker.phase is not Phase.HELD for worker in workers):
                    break
                for worker in workers:
                    self.add(worker)
                letters += self.answer(workers)
            orders.popleft()
        return letters

    def answer(self, workers: Sequence[Worker]) -> list[tuple[int, Letter]]:
        """Answer these workers, all with the same values."""
        snapshot = self.values.copy() if workers else NOTHING
        answers = []
        for worker in workers:
            answer = Letter(ANSWER, era=self.era, clock=worker.clock, note=worker.staleness, body=snapshot)
            worker.answered(self.version, snapshot if self.terms.compensation else NOTHING)
            answers.append((worker.rank, answer))
        return answers

    def among(self, *phases: Phase) -> list[Worker]:
        """The workers in these phases, in rank order."""
        return [worker for worker in self.workers.values() if worker.phase in phases]

    def next_update(self) -> Worker | None:
        """The worker with the next update that may be added now; None if there is none."""
        held, computing = self.among(Phase.HELD), self.among(Phase.COMPUTING)
        if not held or (self.terms.together and computing):
            return None
        if self.terms.together or self.terms.age is None:
            return held[0]
        first = min(held, key=lambda worker: worker.view)
        limit = self.terms.age * len(self.workers)
        rest = sorted(worker.view for worker in (*held, *computing) if worker is not first)
        in_time = all(self.version + 1 + place - view <= limit for place, view in enumerate(rest))
        return first if in_time or not computing else None

    def add(self, worker: Worker) -> None:
        """Add a worker's update."""
        delta, staleness = worker.update[0], (self.version - worker.view) // len(self.workers)
        if self.terms.compensation and not self.terms.together:
            delta = delta + delta * self.terms.compensation * worker.update[1] * (self.values - worker.seen)
        if self.terms.scaled and staleness:
            delta = delta / (1 + staleness)
        self.values[...] = self.values + delta
        self.version += 1
        worker.added(staleness)

    def may_go_on(self, worker: Worker) -> bool:
        """Whether a worker whose update is added may begin the next one."""
        if self.terms.clock is None or self.terms.together:
            return True
        slowest = min(other.clock for other in self.workers.values() if other.phase is not Phase.PARKED)
        return slowest >= worker.clock - self.terms.clock

    def slowest(self) -> int | None:
        """The rank of the computing worker with the fewest updates; None if none computes."""
        return (
            min(self.among(Phase.COMPUTING), key=lambda each: each.clock).rank if self.among(Phase.COMPUTING) else None
        )


def hashed(values: Array) -> bytes:
    """A digest of an array's bytes."""
    return blake2b(values.tobytes(), digest_size=8).digest()
