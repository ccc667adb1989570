"""The registered process sets of a job: who is in each, and the lanes of those that this process is a member of.

Every process knows every set, and all number them alike (0 is everyone, freed numbers are used first), so making and
removing one is collective over the job. A set's own calls concern its members only: each set has its own eager lane,
and its optimizers have lanes of their own, so sets run at the same time and have names of their own.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from hvdlite.algorithms import Place
from hvdlite.errors import RemovedError
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.job.topology import Topology
from hvdlite.lanes import swallowed
from hvdlite.lanes.calls import calling
from hvdlite.lanes.common_rounds import LONGEST_NAP, SHORTEST_NAP
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.matching import said_by
from hvdlite.lanes.observer import Observer
from hvdlite.lanes.pair_lanes import Post
from hvdlite.lanes.request import Request, T
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.transports import Communicator


class Group:
    """A process set that this process is a member of. ranks: global, ascending; `rank`: this process' place there.
    family: all lanes of this process."""

    def __init__(
        self, ranks: tuple[int, ...], transport: Communicator, place: Place, observers: Sequence[Observer],
        family: Callable[[], Iterable[Lane]],
    ) -> None:
        self.ranks, self.size, self.rank, self.transport = ranks, len(ranks), transport.rank, transport
        self.eager = Lane(transport, place, ranks, observers=observers, family=family)
        """Where the user's calls run."""
        self.lanes = [self.eager]
        """The eager one, then those of optimizers, in the order of their making, which all members share."""
        self.free: set[int] = set()
        """The numbers of lanes whose users are no more."""
        self.post = Post(transport, ranks, observers, family)
        """Messages between two members."""
        self.unnamed = count(1)
        """Numbers for calls without a name."""
        self.serials = Counter[str]()

    @property
    def removed(self) -> bool:
        """Whether this set was removed; calls on its lanes then are a RemovedError."""
        return isinstance(self.eager.closed, RemovedError)

    def serial(self, kind: str) -> int:
        """1, 2, 3, ... per kind: names for what the user did not name, equal on all members that do the same."""
        self.serials[kind] += 1
        return self.serials[kind]

    def new_lane(self, name: str, user: object, title: str = "") -> Lane:
        """A lane of its own over all members, for as long as `user` lives; one whose user is no more, on any of them,
        is used again, for MPIs know 2,000 communicators. Collective: made as a request on the eager lane. title: the
        user in messages."""

        def work(at: Workplace) -> int:
            free = [n for n in list(self.free) if self.lanes[n].closed is None and not self.lanes[n].queue.pending]
            everyones = [set(theirs) for theirs in self.transport.allgather_object(free)]
            number = min(set.intersection(*everyones), default=len(self.lanes))
            if number == len(self.lanes):
                transport = self.transport.duplicate()
                eager = self.eager
                self.lanes.append(Lane(transport, eager.place, self.ranks, key, eager.queue.observers, eager.family))
            self.free.discard(number)
            self.lanes[number].serve_another(key, title)
            return number

        key = f"{name} ({len(self.lanes)})"
        with calling(f"hvd.{title or name}"):
            number: int = self.eager.run(Request(Signature("new lane", key), work))
        weakref.finalize(user, self.free.add, number).atexit = False
        return self.lanes[number]


class Groups:
    """All sets of a job. place: the facts for `choose` among given ranks. observers: of all lanes."""

    def __init__(
        self, world: Communicator, topology: Topology, place: Callable[[Sequence[int]], Place],
        observers: Sequence[Observer],
    ) -> None:
        self.rank, self.size, self.place, self.observers = topology.rank, topology.size, place, observers
        self.ranks: dict[int, tuple[int, ...]] = {}
        self.mine: dict[int, Group] = {}
        self.registered: dict[int, list[ProcessSet]] = {}
        self.changes = count(1)
        self.bind(global_process_set, self.open(tuple(range(self.size)), world))
        self.everyone = self.mine[0]

    def of(self, process_set: ProcessSet) -> Group:
        """The group of a set. Raises ValueError where it is unknown or this process is no member."""
        found = self.find(process_set)
        if found is None:
            raise ValueError(f"rank {self.rank} is not a member of {process_set}: only members may call")
        return found

    def find(self, process_set: ProcessSet) -> Group | None:
        """The group of a set; None where this process is no member. Raises ValueError where it is unknown."""
        require_set(process_set)
        number = process_set.process_set_id
        if number is None or process_set not in self.registered.get(number, ()):
            raise ValueError(f"{process_set} is not registered (or not any more, after hvd.remove_process_set() or "
                             "hvd.shutdown()): give it to hvd.init() or hvd.add_process_set()")
        return self.mine.get(number)

    def lanes(self) -> list[Lane]:
        """All lanes there are at the moment. From any thread."""
        groups = list(self.mine.values())
        return [lane for group in groups for lane in (*list(group.lanes), *list(group.post.lanes.values()))]

    def open(self, ranks: tuple[int, ...], world: Communicator) -> int:
        """Enter a set under the smallest free number, which it returns. world: of all ranks. Collective."""
        whole = len(ranks) == self.size
        transport = world.duplicate() if whole else world.split(0 if self.rank in ranks else None)
        number = next(number for number in count() if number not in self.ranks)
        self.ranks[number] = ranks
        if transport is not None:
            self.mine[number] = Group(ranks, transport, self.place(ranks), self.observers, self.lanes)
        return number

    def bind(self, process_set: ProcessSet, number: int) -> None:
        process_set.process_set_id, process_set.ranks = number, list(self.ranks[number])
        self.registered.setdefault(number, []).append(process_set)

    def add(self, process_set: ProcessSet) -> None:
        """Register a set. Collective over the job. Raises ValueError for what `check` refuses."""
        ranks = self.check(process_set.ranks or ())

        number = self.change("add_process_set", ranks, lambda at: self.open(ranks, self.everyone.transport))
        self.bind(process_set, number)

    def remove(self, process_set: ProcessSet) -> bool:
        """Forget a set; what is pending in it fails. Collective over the job. False for one that is not registered."""
        require_set(process_set)
        number = process_set.process_set_id
        if not number or process_set not in self.registered.get(number, ()):
            return False

        def work(at: Workplace) -> None:
            if group := self.mine.get(number):
                for lane in group.lanes:
                    lane.farewell.error = RemovedError(group.ranks)
                leave([group])
                swallowed.forget()  # all take part in this, so nobody has shut down
                del self.mine[number]  # not before: other threads that call it meanwhile are told what it was
            self.forget(number)

        self.change("remove_process_set", self.ranks[number], work)
        return True

    def change(self, kind: str, ranks: tuple[int, ...], work: Callable[[Workplace], T]) -> T:
        """Run `work` on all ranks as a request on everyone's lane, where all agree about the ranks."""
        with calling(f"hvd.{kind}"):
            request = Request(Signature(kind, str(next(self.changes)), (("ranks", ranks),)), work)
        return self.everyone.eager.run(request)

    def forget(self, number: int) -> None:
        del self.ranks[number]
        for process_set in self.registered.pop(number, ()):
            process_set.process_set_id = None

    def check(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks, ascending. Raises ValueError where they are none, unknown, repeated, or another set's."""
        wanted = tuple(sorted(ranks))
        if not wanted or len(set(wanted)) < len(wanted) or not 0 <= wanted[0] <= wanted[-1] < self.size:
            raise ValueError(f"a process set needs some of the ranks 0-{self.size - 1}, each once, not {list(wanted)}")
        if wanted in self.ranks.values():
            raise ValueError(f"there is a process set of the ranks {list(wanted)} already")
        return wanted

    def add_at_start(self, world: Communicator, process_sets: Sequence[ProcessSet]) -> None:
        """Register the sets given to `init()`. Collective over the job. Raises ValueError on every rank where any
        cannot be. Sets made of communicators may differ between ranks: then all of them are registered, and each
        rank's object stands for its own.
        """
        kinds = ["ranks" if process_set.mpi_comm is None else "communicator" for process_set in process_sets]
        mine, problem = [], ""
        try:
            mine = [ranks_of(process_set, world) for process_set in process_sets]
        except ValueError as error:
            problem = str(error)
        everyone = world.allgather_object((kinds, mine, problem))
        problems = {rank: said for rank, (_, _, said) in enumerate(everyone) if said}
        if problems:
            raise ValueError(f"init(process_sets=...), by rank: {problems}")
        if any(said != kinds for said, *_ in everyone):
            said = said_by([tuple(theirs) for theirs, *_ in everyone], range(world.size))
            raise ValueError(f"init(process_sets=...) differs between ranks, by what sets are made of: {said}")
        for index, process_set in enumerate(process_sets):
            distinct = list(dict.fromkeys(said[index] for _, said, _ in everyone))
            if kinds[index] == "ranks" and len(distinct) > 1:
                said = said_by([theirs[index] for _, theirs, _ in everyone], range(world.size))
                raise ValueError(f"init(process_sets=...): item {index} differs between ranks: {said}")
            for ranks in distinct:
                if ranks or kinds[index] == "ranks":
                    self.add_one_at_start(world, index, ranks)
            if mine[index]:
                self.bind(process_set, self.number_of(mine[index]))

    def add_one_at_start(self, world: Communicator, index: int, wanted: Sequence[int]) -> None:
        try:
            ranks = self.check(wanted)
        except ValueError as error:
            raise ValueError(f"init(process_sets=...): item {index}: {error}") from None
        self.open(ranks, world)

    def number_of(self, ranks: tuple[int, ...]) -> int:
        """Raises KeyError where there is no set of these ranks."""
        for number, known in self.ranks.items():
            if known == ranks:
                return number
        raise KeyError(
            f"there is no process set of the ranks {list(ranks)}: init() was called before, without it; call "
            "hvd.shutdown() first, or add it with hvd.add_process_set() after hvd.init(process_sets='dynamic')"
        )

    def find_again(self, process_sets: Sequence[ProcessSet]) -> None:
        """`init()` was called again: let these objects stand for the sets there are. KeyError for what is none."""
        for process_set in process_sets:
            if process_set.process_set_id is None:
                self.bind(process_set, self.number_of(tuple(process_set.ranks or ())))

    def close(self) -> None:
        """Leave all lanes. Collective over the members of each set."""
        leave(list(self.mine.values()))
        for number in list(self.ranks):
            self.forget(number)


def require_set(found: Any) -> None:
    """Raises TypeError for what is no ProcessSet."""
    if not isinstance(found, ProcessSet):
        raise TypeError(f"process_set must be an hvd.ProcessSet, not {found!r}")


def leave(groups: Sequence[Group]) -> None:
    """Leave all lanes of these groups. Collective over their members; waits for all.

    It begins with all lanes at once, and answers who sends messages, so that a rank that waits in any of them for
    this one learns of it. When all have come to leave, they tell each other which pairs have lanes.
    """
    lanes = [lane for group in groups for lane in group.lanes]
    for lane in lanes:
        if lane.closed is None:
            lane.start_leaving()
    for lane in lanes:
        if lane.farewell.departure is not None:
            lane.serve()
    leaving = [lane.farewell.departure for lane in lanes if lane.farewell.departure is not None]
    nap = SHORTEST_NAP
    while True:
        for group in groups:
            group.post.start_leaving()
        if all(handle.done for handle in leaving):
            break
        time.sleep(nap)
        nap = min(2 * nap, LONGEST_NAP)
    for handle in leaving:
        handle.wait()  # raises where communication broke meanwhile: then nothing can be agreed on any more
    for group in groups:
        if group.eager.farewell.departure is not None:
            group.post.leave(group.transport.allgather_object(list(group.post.lanes)))
        for lane in group.lanes:
            lane.leave()


def ranks_of(process_set: ProcessSet, world: Communicator) -> tuple[int, ...]:
    """The set's ranks, ascending; none for a communicator that this process is not in."""
    found = process_set.ranks if process_set.mpi_comm is None else world.ranks_of(process_set.mpi_comm)
    return tuple(sorted(found or ()))
