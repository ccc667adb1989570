"""Bounded staleness: no rank waits for the others at each update, and none uses weights that are too old.

    optimizer = hvd.DistributedOptimizer(optimizer, strategy=hvd.BoundedStaleness(clock=4))

The parameters lie in slices, and each slice has an owner (Li et al. 2014, "Scaling distributed machine learning with
the parameter server"). Each worker runs the user's optimizer on its own gradients. After an update it sends to each
owner the change of that slice, divided by the number of workers. The answer is the slice's new values. `owner` says
when an owner adds an update and answers it. Letters travel through a mailbox, so only sender and owner take part.

    worker   gradients | update | deltas ->            -> new weights | gradients
    owners                               add, hold, answer             (each rank, or the last `servers` ranks)

Price: per update a worker sends and receives all weights once; each owner adds p slices. Rejected: to read the answer
before the next update, while gradients are computed: these gradients would belong to older weights than the bound says.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from hvdlite.algorithms import movement
from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.lanes.calls import calling
from hvdlite.lanes.mailbox import LEAVE, NOTHING, Letter, Mailbox
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.strategies import Running, Site, Strategy
from hvdlite.strategies.layout import Layout, layout
from hvdlite.strategies.owner import ANSWER, FIRST_UPDATE, ORDER, PARK, UPDATE, Owner, Terms
from hvdlite.strategies.traffic import abroad


@dataclass(frozen=True)
class BoundedStaleness(Strategy):
    """Ranks train at their own speeds, within a bound. `BoundedStaleness(0)` is synchronous, and None has no bound.

    Attributes:
        clock: No rank begins an update while it is more than this many updates ahead of the slowest rank (stale
            synchronous parallel; Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel
            parameter server"). A rank that stays slow slows all to its own speed. None: no such bound.
        age: The longest age of the weights that an update was computed with, in updates of each rank. An update that
            would make another rank's weights older is held. None: no such bound.
        servers: The number of ranks, the last ones, that own all slices and do not train. They call
            `hvd.serve_parameters`. 0: each rank owns one slice and trains.
        delay_compensation: The factor lambda of DC-ASGD (Zheng et al. 2017): an update d with gradient g that was
            computed with weights w' and is added to weights w becomes d + lambda d g (w - w'). The gradients travel,
            too, and an owner keeps its last answer to each worker. 0.0: none.
        scale_by_staleness: Whether an update is divided by 1 + its staleness, in updates of each rank (Zhang et al.
            2016, "Staleness-aware async-SGD").
    """

    clock: int | None = None
    age: int | None = None
    _: KW_ONLY
    servers: int = 0
    delay_compensation: float = 0.0
    scale_by_staleness: bool = False

    def __post_init__(self) -> None:
        for name, bound in (("clock", self.clock), ("age", self.age), ("servers", self.servers)):
            if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool) or bound < 0):
                raise ValueError(f"BoundedStaleness({name}={bound!r}) must be a number from 0 on")
        if self.clock is not None and self.age is not None:
            raise ValueError(f"BoundedStaleness(clock={self.clock}, age={self.age}): give one of both bounds")

    @property
    def terms(self) -> Terms:
        """The settings of an owner."""
        return Terms(self.clock, self.age, self.delay_compensation, self.scale_by_staleness)

    def start(self, site: Site) -> Worker | Server:
        """Begin to work for one optimizer. Collective; waits for all ranks. The weights may still change.

        Args:
            site: The optimizer.

        Returns:
            A `Server` on the last `servers` ranks, and a `Worker` on the others.

        Raises:
            ValueError: All ranks would be servers.
        """
        size = site.group.size
        if self.servers >= size:
            raise ValueError(f"BoundedStaleness(servers={self.servers}) leaves no worker among {size} ranks")
        return Server(self, site) if site.group.rank >= size - self.servers else Worker(self, site)


class Member(Running):
    """What workers and servers have in common: the rank's slice, and `settle`.

    Attributes:
        terms: The settings.
        site: The optimizer.
        workers: The ranks that train.
        owners: The ranks that own slices.
        owner: This rank's slice; None if it owns none.
        lock: Held while `owner` is used.
        layout: Where the parameters lie; None before the weights are known.
        era: This rank's era; see `owner`.
        base: The era in which the weights were last given from outside.
        settled: The number of calls of `settle`.
        mailbox: The letters.
    """

    def __init__(self, strategy: BoundedStaleness, site: Site) -> None:
        group = site.group
        self.terms, self.site = strategy.terms, site
        self.workers = range(group.size - strategy.servers)
        self.owners = range(len(self.workers), group.size) if strategy.servers else self.workers
        mine = group.rank in self.owners
        self.owner = Owner(self.terms, self.workers, self.owners, group.rank) if mine else None
        self.lock = threading.Lock()
        self.layout: Layout | None = None
        self.era, self.base, self.settled = 1, 1, 0
        self.mailbox = group.new_mailbox(site.title, self)

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Read a letter. Called in the mailbox's thread."""
        if self.owner is not None and letter.kind in (UPDATE, FIRST_UPDATE, PARK, ORDER, LEAVE):
            with self.lock:
                answers = self.owner.take(letter)
            for rank, answer in answers:
                mailbox.post(rank, answer)

    def layout_of(self, weights: Sequence[Array]) -> Layout:
        """The layout, made at the first call."""
        if self.layout is None:
            self.layout = layout(self.site.names, weights, len(self.owners))
        return self.layout

    def settle(self, weights: Sequence[Array]) -> None:
        """Overwrite the weights with the slices' values, equal on all ranks. Collective; waits for all ranks.

        No update is under way then. If no rank has made an update yet, the weights stay as they are.

        Args:
            weights: The weights, which change in place.

        Raises:
            MismatchError: The ranks' parameters differ, or a rank has joined instead.
            ShutdownError: A rank has shut down instead.
        """
        self.settled += 1
        places = self.layout_of(weights)
        request = Request(Signature("settle", self.site.name, (("parameters", places.plan),)), self.gather)
        with calling(f"settle of {self.site.title}"):
            flat = self.site.group.eager.run(request)
        if flat is not None:
            places.overwrite(weights, flat)

    def gather(self, at: Workplace) -> Array | None:
        """All slices' values as one array; None if no rank has made an update. Collective.

        All ranks are in `settle`, so no update is under way. A quick rank may go on as soon as it has all slices. Then
        each owner has given its own.
        """
        mine = self.base if at.transport.rank in self.workers else 0  # servers do not know of `moved`
        everyone = at.transport.allgather_object((mine, self.owner.base if self.owner else None))
        self.era += 1
        base = max(base for base, _ in everyone)
        if self.layout is None or any(owned not in (None, base) for _, owned in everyone):
            return None
        flat = np.zeros(self.layout.borders[-1], self.layout.dtype)
        pieces: list[Array] = [flat[:0]] * at.transport.size
        for place, rank in enumerate(self.owners):
            pieces[rank] = flat[self.layout.part(place)]
        if self.owner is not None:
            with self.lock:
                pieces[at.transport.rank][...] = self.owner.values
        movement.allgather(at.transport, pieces)
        return flat

    def moved(self) -> None:
        """Weights were changed from outside, on all ranks to the same values: start from these."""
        self.era += 1
        self.base = self.era

    def start_over(self, step: int) -> None:
        """All ranks have joined: count from 0 again. The caller settles next."""
        self.era += 1

    def before_waiting(self) -> None:
        """A thread of this rank is about to wait in a collective."""

    def abandon(self) -> None:
        """The optimizer is gone here: tell all ranks. The mailbox's thread ends when it is gone on all of them."""
        self.mailbox.start_leaving()

    def close(self) -> None:
        """End the mailbox. Collective; waits for all ranks, which get answers until then."""
        self.site.group.close_mailbox(self.mailbox)


class Worker(Member):
    """A rank that trains.

    Attributes:
        clock: The number of updates in this era.
        paused: Whether the owners know in this era that this rank waits outside of its updates.
        given: The weights as the last answers, or `settle`, left them; empty before.
        told: The largest era of the last answers.
        before: The weights before the update under way; empty between updates.
        gradient: The gradients of the update under way, if delay is compensated.
        pushed: The base of the values that the owners know; see `Member`.
        answers: The owners' answers to the last update.
        counts: The number of this rank's updates for each staleness.
        sent: The bytes of updates that this rank has sent to owners on other hosts.
    """

    def __init__(self, strategy: BoundedStaleness, site: Site) -> None:
        self.given: Array = NOTHING
        self.told, self.paused = 1, False
        self.before: Array = NOTHING
        self.gradient: Array = NOTHING
        self.clock, self.pushed, self.sent = 0, 0, 0
        self.answers: dict[int, Letter] = {}
        self.counts = Counter[int]()
        super().__init__(strategy, site)

    @property
    def sent_bytes(self) -> float:
        return self.sent

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Read a letter. Called in the mailbox's thread."""
        if letter.kind == ANSWER:
            self.answers[letter.source] = letter
        else:
            super().receive(mailbox, letter)

    def update_begins(self) -> bool:
        """An update begins. Returns True: `before_update` must follow."""
        return True

    def before_update(self, weights: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """Note the weights, and gradients if delay is compensated. Changes nothing.

        Raises:
            HvdliteError: Another rank's weights were changed between its updates, and this rank's were not.
        """
        places = self.layout_of(weights)
        self.before = places.flatten(weights)
        if self.given.size and self.before.tobytes() != self.given.tobytes():
            self.moved()
        if self.era < self.told:
            raise HvdliteError(
                f"{self.site.title}: weights were changed between updates on another rank, and not on rank "
                f"{self.site.group.rank}. Give all ranks the same weights, as with "
                "hvd.broadcast_variables(model, 0) [HVD301]"
            )
        if self.terms.compensation:
            self.gradient = places.flatten(gradients)

    def update_ends(self) -> bool:
        """An update has ended. Returns whether `before_update` was called for it: then `after_update` must follow."""
        return self.before.size > 0

    def after_update(self, weights: Sequence[Array], state: Mapping[str, Array]) -> bool:
        """Send the update to the owners, wait for their answers, and overwrite the weights with them.

        Args:
            weights: The weights, which change in place.
            state: Not used.

        Returns:
            Whether all workers have equal weights now: in synchronous training.

        Raises:
            HvdliteError: Communication has broken.
        """
        places = self.layout_of(weights)
        delta = (places.flatten(weights) - self.before) * (1 / len(self.workers))
        parts = [delta, self.gradient] if self.terms.compensation else [delta]
        kind = UPDATE if self.pushed == self.base else FIRST_UPDATE
        if kind == FIRST_UPDATE:
            parts.append(self.before)
        self.clock += 1
        self.paused, self.answers = False, {}
        for place, owner in enumerate(self.owners):
            body = np.concatenate([part[places.part(place)] for part in parts])
            self.mailbox.post(
                owner, Letter(kind, places.plan, self.era, self.clock, self.base, places.dtype.itemsize, body)
            )
            self.sent += body.nbytes * len(abroad(self.site.group, [owner]))
        self.mailbox.wait(self.answered, f"update {self.clock} of {self.site.title}", self.awaited)
        answers = [self.answers[owner] for owner in self.owners]
        places.overwrite(weights, np.concatenate([answer.body.view(places.dtype) for answer in answers]))
        self.given, self.told = places.flatten(weights), max(answer.era for answer in answers)
        self.counts[max(answer.note for answer in answers)] += 1
        self.before, self.pushed = NOTHING, self.base
        return self.terms.together

    def answered(self) -> bool:
        """Whether all owners have answered."""
        return len(self.answers) == len(self.owners)

    def awaited(self) -> int:
        """The rank that an answer waits for: the slowest worker, as far as this rank knows, or the owner."""
        slowest = None
        if self.owner is not None:
            with self.lock:
                slowest = self.owner.slowest()
        missing = [owner for owner in self.owners if owner not in self.answers]
        return slowest if slowest is not None else missing[0] if missing else self.site.group.rank

    def before_waiting(self) -> None:
        """A thread of this rank is about to wait in a collective: it must not hold back ranks that are on their way.

        With `clock` it holds back none, since all ranks come to a collective after equally many updates.
        """
        if self.terms.age:
            self.pause()

    def pause(self) -> None:
        """Let the others go on without this rank until its next update. Waits for nobody."""
        if not self.paused:
            self.paused = True
            self.post_park(0)

    def post_park(self, settled: int) -> None:
        """Send PARK to all owners. settled: the number of the call of `settle` that follows; 0 for none."""
        for owner in self.owners:
            self.mailbox.post(owner, Letter(PARK, era=self.era, note=settled))

    def prepare(self) -> None:
        """Announce `settle` to all owners, and let the others go on."""
        self.post_park(self.settled + 1)

    def settle(self, weights: Sequence[Array]) -> None:
        """As `Member.settle`."""
        self.prepare()
        super().settle(weights)
        self.clock, self.paused, self.given = 0, False, self.layout_of(weights).flatten(weights)

    def gather(self, at: Workplace) -> Array | None:
        """As `Member.gather`."""
        flat = super().gather(at)
        if flat is not None:
            self.pushed = self.base
        return flat

    def moved(self) -> None:
        """As `Member.moved`. `before_update` calls it, too, if it finds other weights than expected."""
        super().moved()
        self.clock, self.paused, self.given = 0, False, NOTHING

    def abandon(self) -> None:
        """As `Member.abandon`."""
        self.paused = True  # LEAVE says it, too
        super().abandon()

    def start_over(self, step: int) -> None:
        """As `Member.start_over`."""
        super().start_over(step)
        self.clock, self.paused = 0, False


class Server(Member):
    """A rank that owns a slice, and does not train.

    Attributes:
        wanted: The number of the last call of `settle` that a worker has announced.
    """

    def __init__(self, strategy: BoundedStaleness, site: Site) -> None:
        self.wanted = 0
        super().__init__(strategy, site)

    def receive(self, mailbox: Mailbox, letter: Letter) -> None:
        """Read a letter. Called in the mailbox's thread."""
        super().receive(mailbox, letter)
        if letter.kind == PARK:
            self.wanted = max(self.wanted, letter.note)

    def update_begins(self) -> bool:
        """Raise HvdliteError: servers do not train."""
        raise HvdliteError(
            f"rank {self.site.group.rank} is one of the last {len(self.owners)} ranks, which own the parameters "
            "(BoundedStaleness(servers=...)) and do not train: call hvd.serve_parameters(optimizer, model) there"
        )

    def serve(self, settle: Callable[[], object]) -> None:
        """Answer workers until all of them have left (`hvd.shutdown()`).

        Args:
            settle: Called when workers settle, to take part.
        """
        while True:
            self.mailbox.wait(lambda: self.deserted or self.wanted > self.settled, self.site.title, self.nobody)
            if self.wanted <= self.settled:
                return
            settle()

    @property
    def deserted(self) -> bool:
        """Whether all workers have left."""
        return self.mailbox.left.issuperset(self.workers)

    def nobody(self) -> int:
        """The rank that a server waits for: none but itself, so the stall watch sees no wait."""
        return self.site.group.rank


def server(running: Running | None) -> Server:
    """Return the server at work on this rank. Raises ValueError if this rank trains."""
    if not isinstance(running, Server):
        raise ValueError("hvd.serve_parameters is for the ranks that hvd.BoundedStaleness(servers=...) makes servers")
    return running


def staleness() -> dict[int, int]:
    """Return how stale this rank's updates were when they were added. Waits for nobody.

    Returns:
        For each staleness the number of this rank's updates, of all optimizers that are attached with
        `BoundedStaleness`. Staleness counts the updates of each rank that were added since this rank got the weights
        with which it computed the update; of several slices the largest.

    Raises:
        NotInitializedError: `hvd.init()` has not been called.
    """
    found = Counter[int]()
    for group in list(runtime.current().groups.mine.values()):
        for mailbox in list(group.mailboxes):
            if isinstance(mailbox.reader, Worker):
                found += mailbox.reader.counts
    return dict(sorted(found.items()))
