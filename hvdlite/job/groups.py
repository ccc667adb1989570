"""The registered process sets of a job, and the lanes of the sets that this process is a member of.

Every process knows every set, under the same number. Number 0 is the set of all ranks, and the smallest free number is
used next. So adding or removing a set is collective over the job. Calls in a set concern its members only. In each set,
the user's calls have one lane (the eager lane). Attached optimizers and gradient tapes have lanes of their own. So sets
run at the same time, and names need not differ between sets.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from hvdlite.algorithms import Place
from hvdlite.errors import RemovedError
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.job.topology import Topology
from hvdlite.lanes import swallowed
from hvdlite.lanes.calls import calling
from hvdlite.lanes.common_rounds import LONGEST_NAP, SHORTEST_NAP
from hvdlite.lanes.lane import EAGER, Lane
from hvdlite.lanes.mailbox import Mailbox, Reader
from hvdlite.lanes.matching import said_by
from hvdlite.lanes.observer import Observer
from hvdlite.lanes.pair_lanes import Post
from hvdlite.lanes.request import Request, T
from hvdlite.lanes.signature import Facts, Signature, digest
from hvdlite.lanes.workplace import Workplace
from hvdlite.transports import Communicator


class Group:
    """A process set that this process is a member of.

    Attributes:
        ranks: The global ranks: ascending in a process set.
        size: The number of ranks.
        rank: This process' number among them.
        transport: The communicator of these ranks.
        eager: The lane of the user's calls.
        lanes: The eager lane, then those of optimizers, in the order of their creation, the same on all members.
        free: The numbers of lanes that may be used again.
        post: Messages between two members.
        mailboxes: Letters without a roll call; each object that needs them has its own.
        unnamed: Numbers for calls without a name.
        serials: For each kind of object the numbers given so far.
        taken: Whether an object of this process calls in it. (Process sets always count as taken.)
    """

    def __init__(
        self,
        ranks: tuple[int, ...],
        transport: Communicator,
        place: Place,
        observers: Sequence[Observer],
        family: Callable[[], Iterable[Lane]],
        name: str = EAGER,
    ) -> None:
        """
        Args:
            ranks: The global ranks, in the transport's order.
            transport: The communicator of these ranks.
            place: The facts from which algorithms are chosen.
            observers: The observers of all lanes.
            family: Returns all lanes of this process.
            name: The name of the eager lane.
        """
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = transport.rank
        self.transport = transport
        self.eager = Lane(transport, place, ranks, name, observers, family)
        self.lanes = [self.eager]
        self.free: set[int] = set()
        self.post = Post(transport, ranks, observers, family)
        self.mailboxes: list[Mailbox] = []
        self.unnamed = count(1)
        self.serials = Counter[str]()
        self.taken = True

    @property
    def removed(self) -> bool:
        """Whether this set was removed, so that calls on its lanes raise RemovedError."""
        return isinstance(self.eager.closed, RemovedError)

    @property
    def idle(self) -> bool:
        """Whether a new object of the same ranks may use this group."""
        return not (self.taken or self.eager.queue.pending or self.eager.closed)

    def take(self) -> None:
        """A new object uses this group from now on."""
        self.taken = True

    def give_back(self) -> None:
        """The object that used this group has ended."""
        self.taken = False

    def serial(self, kind: str) -> int:
        """The next number of a kind, from 1. It is equal on all members that make the same calls."""
        self.serials[kind] += 1
        return self.serials[kind]

    def go_on_from(self, serials: Iterable[Counter[str]], unnamed: int) -> None:
        """Continue at the largest of all ranks' numbers, after ranks have made different calls.

        Args:
            serials: Each rank's numbers of named kinds.
            unnamed: The next number for calls without a name.
        """
        for theirs in serials:
            self.serials |= theirs  # the larger of each
        self.unnamed = count(unnamed)

    def new_lane(self, name: str, user: object, title: str = "", facts: Facts = ()) -> Lane:
        """A lane over all members for one object. Collective: a request on the eager lane makes it.

        When the object is gone on all members, the lane is used again, since MPIs have about 2,000 communicators only.

        Args:
            name: The first part of the lane's name.
            user: The object. The lane does not keep it alive.
            title: The object's name in messages.
            facts: What all members must agree on.
        """

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
            number: int = self.eager.run(Request(Signature("new lane", key, facts), work))
        weakref.finalize(user, self.free.add, number).atexit = False
        return self.lanes[number]

    def new_mailbox(self, title: str, reader: Reader, facts: Facts = ()) -> Mailbox:
        """A mailbox over all members for one object. Collective: a request on the eager lane makes it.

        Args:
            title: The object's name in messages, equal on all members.
            reader: Gets each letter, in the mailbox's thread.
            facts: What all members must agree on.
        """

        def work(at: Workplace) -> Mailbox:
            return Mailbox(self.transport.duplicate(), self.eager, self.post, title, reader)

        key = f"{title} ({self.serial('mailbox')})"
        with calling(title):
            mailbox = self.eager.run(Request(Signature("new mailbox", key, facts), work))
        self.mailboxes.append(mailbox)
        return mailbox

    def close_mailbox(self, mailbox: Mailbox) -> None:
        """Release a mailbox. Collective; waits for all members."""
        mailbox.close()
        self.mailboxes.remove(mailbox)


class Groups:
    """All process sets of a job.

    Attributes:
        rank: This process' global rank.
        size: The number of ranks in the job.
        place: Returns the facts from which algorithms are chosen for given ranks.
        observers: The observers of all lanes.
        ranks: The global ranks of each set, by the set's number.
        mine: The groups of the sets with this process as a member, by number.
        private: The groups that only their members know, by their ranks, in the order of their creation.
        registered: The ProcessSets of each number.
        changes: Numbers the changes of sets.
        everyone: The group of all ranks.
    """

    def __init__(
        self,
        world: Communicator,
        topology: Topology,
        place: Callable[[Sequence[int]], Place],
        observers: Sequence[Observer],
    ) -> None:
        self.rank = topology.rank
        self.size = topology.size
        self.place = place
        self.observers = observers
        self.ranks: dict[int, tuple[int, ...]] = {}
        self.mine: dict[int, Group] = {}
        self.private: dict[tuple[int, ...], list[Group]] = {}
        self.registered: dict[int, list[ProcessSet]] = {}
        self.changes = count(1)
        self.bind(global_process_set, self.open(tuple(range(self.size)), world))
        self.everyone = self.mine[0]

    def of(self, process_set: ProcessSet) -> Group:
        """The group of a set. Raises ValueError if it is not registered, or this process is not a member."""
        found = self.find(process_set)
        if found is None:
            raise ValueError(f"rank {self.rank} is not a member of {process_set}: only members may call [HVD207]")
        return found

    def find(self, process_set: ProcessSet) -> Group | None:
        """The group of a set; None if this process is not a member. Raises ValueError if it is not registered."""
        require_set(process_set)
        number = process_set.process_set_id
        if number is None or process_set not in self.registered.get(number, ()):
            raise ValueError(
                f"{process_set} is not registered (or not any more, after hvd.remove_process_set() or "
                "hvd.shutdown()): give it to hvd.init() or hvd.add_process_set() [HVD207]"
            )
        return self.mine.get(number)

    def lanes(self) -> list[Lane]:
        """The lanes that exist now. May be called in any thread."""
        groups = [*list(self.mine.values()), *(group for same in list(self.private.values()) for group in list(same))]
        return [lane for group in groups for lane in (*list(group.lanes), *list(group.post.lanes.values()))]

    def open(self, ranks: tuple[int, ...], world: Communicator) -> int:
        """Add a set, and return its number. Collective over the job. world: the communicator of all ranks."""
        whole = len(ranks) == self.size
        transport = world.duplicate() if whole else world.split(0 if self.rank in ranks else None)
        number = next(number for number in count() if number not in self.ranks)
        self.ranks[number] = ranks
        if transport is not None:
            self.mine[number] = Group(ranks, transport, self.place(ranks), self.observers, self.lanes)
        return number

    def open_private(self, ranks: tuple[int, ...], number: int) -> Group:
        """A group that only its members know. Collective over its members.

        Args:
            ranks: The global ranks, in any order.
            number: Equal on all members: one of the numbers that `private` has for these ranks, to use that group
                again, or the next number, for a new group.
        """
        same = self.private.setdefault(ranks, [])
        if number == len(same):
            transport = self.everyone.transport.some(ranks, digest(f"{ranks} {number}"))
            name = f"process group {number} of {ranks}"
            same.append(Group(ranks, transport, self.place(ranks), self.observers, self.lanes, name))
        return same[number]

    def bind(self, process_set: ProcessSet, number: int) -> None:
        """Let a ProcessSet stand for the set of this number."""
        process_set._bind(number, self.ranks[number])
        self.registered.setdefault(number, []).append(process_set)

    def go_on_from(self, change: int) -> None:
        """Continue with this number for the next change of process sets."""
        self.changes = count(change)

    def add(self, process_set: ProcessSet) -> None:
        """Register a set. Collective over the job. Raises ValueError for ranks that `check` refuses."""
        ranks = self.check(process_set.ranks or ())
        number = self.change("add_process_set", ranks, lambda at: self.open(ranks, self.everyone.transport))
        self.bind(process_set, number)

    def remove(self, process_set: ProcessSet) -> bool:
        """Remove a set. Its pending requests fail. Collective over the job.

        Returns:
            False, at once, if the set is the global set or is not registered.
        """
        require_set(process_set)
        number = process_set.process_set_id
        if not number or process_set not in self.registered.get(number, ()):
            return False

        def work(at: Workplace) -> None:
            if group := self.mine.get(number):
                for lane in group.lanes:
                    lane.farewell.leave_with(RemovedError(group.ranks))
                leave([group])
                swallowed.forget()  # all ranks take part in this, so none has shut down
                del self.mine[number]  # last: until then calls in other threads raise RemovedError
            self.forget(number)

        self.change("remove_process_set", self.ranks[number], work)
        return True

    def change(self, kind: str, ranks: tuple[int, ...], work: Callable[[Workplace], T]) -> T:
        """Run `work` on all ranks as a request on everyone's lane. Raises MismatchError if `ranks` differs."""
        with calling(f"hvd.{kind}"):
            request = Request(Signature(kind, str(next(self.changes)), (("ranks", ranks),)), work)
        return self.everyone.eager.run(request)

    def forget(self, number: int) -> None:
        """Unregister the set of this number."""
        del self.ranks[number]
        for process_set in self.registered.pop(number, ()):
            process_set._unbind()

    def check(self, ranks: Iterable[int]) -> tuple[int, ...]:
        """The ranks, ascending. Raises ValueError if some are unknown or repeated, or a set has them, or for none."""
        wanted = tuple(sorted(ranks))
        if not wanted or len(set(wanted)) < len(wanted) or not 0 <= wanted[0] <= wanted[-1] < self.size:
            raise ValueError(f"a process set needs some of the ranks 0-{self.size - 1}, each once, not {list(wanted)}")
        if wanted in self.ranks.values():
            raise ValueError(f"there is a process set of the ranks {list(wanted)} already")
        return wanted

    def add_at_start(self, world: Communicator, process_sets: Sequence[ProcessSet]) -> None:
        """Register the sets given to `init()`. Collective over the job.

        Sets made of communicators may differ between ranks. Then all of them are registered, and each rank's ProcessSet
        stands for its own communicator.

        Raises:
            ValueError: On every rank, if a set is impossible on any rank.
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
        """Register item `index` of the list given to `init()`. Collective; raises ValueError as `check` does."""
        try:
            ranks = self.check(wanted)
        except ValueError as error:
            raise ValueError(f"init(process_sets=...): item {index}: {error}") from None
        self.open(ranks, world)

    def number_of(self, ranks: tuple[int, ...]) -> int:
        """The number of the set of these ranks. Raises KeyError if there is none."""
        for number, known in self.ranks.items():
            if known == ranks:
                return number
        raise KeyError(
            f"there is no process set of the ranks {list(ranks)}: init() was called before, without it; call "
            "hvd.shutdown() first, or add it with hvd.add_process_set() after hvd.init(process_sets='dynamic')"
        )

    def find_again(self, process_sets: Sequence[ProcessSet]) -> None:
        """`init()` was called again: bind these ProcessSets to the registered sets. Raises KeyError if one has none."""
        for process_set in process_sets:
            if process_set.process_set_id is None:
                self.bind(process_set, self.number_of(tuple(process_set.ranks or ())))

    def close(self) -> None:
        """Leave all lanes. Collective over the members of each set."""
        leave([*self.mine.values(), *(group for _, same in sorted(self.private.items()) for group in same)])
        for number in list(self.ranks):
            self.forget(number)


def require_set(found: object) -> None:
    """Raise TypeError if it is not a ProcessSet."""
    if not isinstance(found, ProcessSet):
        raise TypeError(f"process_set must be an hvd.ProcessSet, not {found!r}")


def leave(groups: Sequence[Group]) -> None:
    """Leave all lanes of these groups. Collective over their members; waits for all.

    A rank may wait for this one in any lane, or in a message. So this rank leaves all lanes at once, and answers
    messages and letters until all ranks leave. Then the ranks tell each other which pairs have lanes, and these leave,
    too.
    """
    lanes = [lane for group in groups for lane in group.lanes]
    mailboxes = [mailbox for group in groups for mailbox in group.mailboxes]
    for mailbox in mailboxes:
        mailbox.start_leaving()
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
        handle.wait()  # raises if communication broke meanwhile, after which the ranks can agree on nothing
    for mailbox in mailboxes:
        mailbox.close()
    for group in groups:
        if group.eager.farewell.departure is not None:
            group.post.leave(group.transport.allgather_object(list(group.post.lanes)))
        for lane in group.lanes:
            lane.leave()


def ranks_of(process_set: ProcessSet, world: Communicator) -> tuple[int, ...]:
    """The set's ranks, ascending; none if it was made of a communicator without this process."""
    found = process_set.ranks if process_set.mpi_comm is None else world.ranks_of(process_set.mpi_comm)
    return tuple(sorted(found or ()))
