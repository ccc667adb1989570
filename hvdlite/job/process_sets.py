"""`ProcessSet`: the user's object for a group of ranks, with Horovod's names.

It holds ranks and a number, and does not communicate: `groups` has the lanes. The job binds it when the set is
registered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

from hvdlite.job import facts

if TYPE_CHECKING:
    from mpi4py import MPI

Given: TypeAlias = "MPI.Comm | Sequence[int] | None"
"""The argument of `init(comm=...)`."""


class ProcessSet:
    """Ranks that take part in a collective. The set is unregistered until `init()` or `add_process_set()` gets it.

    Attributes:
        process_set_id: The set's number, the same on all ranks; 0 for all ranks; None while unregistered.
        ranks: The global ranks, ascending; None for a communicator's set until it is registered.
        mpi_comm: The communicator that the set was made of; None if it was made of ranks.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | MPI.Comm) -> None:
        """
        Args:
            ranks_or_comm: Global ranks, or an mpi4py communicator (for `init()` only).

        Raises:
            ValueError: It is neither.
        """
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: MPI.Comm | None = None
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else None
        if ranks is None or not all(isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of integers or an mpi4py communicator, not {ranks_or_comm!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """The number of members; None while unregistered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process' rank within the set.

        Returns:
            Its rank, from 0; None while the set is unregistered.

        Raises:
            ValueError: This process is not a member.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        if facts.rank() not in self.ranks:
            raise ValueError(f"rank {facts.rank()} is not a member of {self}")
        return self.ranks.index(facts.rank())

    def included(self) -> bool | None:
        """Whether this process is a member.

        Returns:
            None while the members are unknown.

        Raises:
            ValueError: `init()` has not been called.
        """
        return None if self.ranks is None else facts.rank() in self.ranks

    # Called by the job

    def _bind(self, number: int, ranks: Iterable[int]) -> None:
        """The set is registered now.

        Args:
            number: Its number.
            ranks: Its global ranks, ascending.
        """
        self.process_set_id = number
        self.ranks = list(ranks)

    def _unbind(self) -> None:
        """The set is not registered any more. It keeps its ranks."""
        self.process_set_id = None

    def _stand_for(self, comm: MPI.Comm | None) -> None:
        """Note the communicator that this set stands for.

        Args:
            comm: The communicator; None if the user gave none.
        """
        self.mpi_comm = comm

    def _clear(self) -> None:
        """The job has ended: the global set has no ranks."""
        self.ranks = []
        self.mpi_comm = None

    def __deepcopy__(self, memo: dict[int, object]) -> ProcessSet:
        """The same set, so that copies of a model with SyncBatchNorm use it, too."""
        return self

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle the ranks. A registered set becomes the registered set of these ranks where it is unpickled."""
        if self is global_process_set:
            return "global_process_set"
        if self.ranks is None:
            raise TypeError("a process set made of a communicator has no ranks before hvd.init(): it cannot be pickled")
        return (ProcessSet, (self.ranks,)) if self.process_set_id is None else (_of, (self.ranks, self.process_set_id))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def is_communicator(given: object) -> TypeGuard[MPI.Comm]:
    """Whether it is an mpi4py communicator. Does not import mpi4py."""
    return hasattr(given, "Get_group")


global_process_set = ProcessSet([])
"""All ranks of the job."""
if facts.is_child():
    global_process_set._bind(0, range(facts.size()))
_registered: dict[int, list[ProcessSet]] = {}
"""The sets of the present job, by number."""


def note_registered(sets: dict[int, list[ProcessSet]]) -> None:
    """A job has begun, or ended.

    Args:
        sets: The job's own dictionary of its registered sets, by number.
    """
    global _registered
    _registered = sets


def is_dynamic(given: object) -> bool:
    """Whether the argument of `init(process_sets=...)` allows that sets are added and removed later."""
    return isinstance(given, str) and given.lower() == "dynamic"


def sets_of(given: object) -> list[ProcessSet]:
    """The sets in the argument of `init(process_sets=...)`; none for None and for "dynamic".

    Raises:
        ValueError: It is not a list of ProcessSets.
    """
    if is_dynamic(given):
        return []
    sets: list[object] = list(given) if isinstance(given, Iterable) else [] if given is None else [given]
    found = [process_set for process_set in sets if isinstance(process_set, ProcessSet)]
    if isinstance(given, ProcessSet) or len(found) < len(sets):
        raise ValueError(f"init(process_sets=...) takes a list of hvd.ProcessSet objects or 'dynamic', not {given!r}")
    return found


def _of(ranks: list[int], number: int) -> ProcessSet:
    """The registered set of these ranks, or a new one. A child of a rank gets a set with its parent's number."""
    if facts.is_child():
        found = ProcessSet(ranks)
        found._bind(number, ranks)
        return found
    same = [each for sets in _registered.values() for each in sets if each.ranks == ranks]
    return same[0] if same else ProcessSet(ranks)
