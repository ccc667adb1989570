"""Process sets: groups of ranks that communicate among themselves. The names are Horovod's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hvdlite import config
from hvdlite.job import facts


class ProcessSet:
    """Ranks that take part in a collective. Unregistered until given to `init()` or `add_process_set()`.

    ranks_or_comm: global ranks, or an mpi4py communicator (for `init()` only). Raises ValueError for anything else.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        """0 is the global set; None while unregistered."""
        self.ranks: list[int] | None = None
        """Ascending; None for a communicator's set until it is registered."""
        self.mpi_comm: Any = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            return
        ranks = list(ranks_or_comm) if isinstance(ranks_or_comm, Iterable) else [ranks_or_comm, None]
        if not all(isinstance(rank, int) for rank in ranks):
            raise ValueError(f"a ProcessSet is made of integers or an mpi4py communicator, not {ranks_or_comm!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int | None:
        """The number of members; None while unregistered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process' rank within the set; None while unregistered. ValueError when it is no member."""
        if self.process_set_id is None or self.ranks is None:
            return None
        if facts.rank() not in self.ranks:
            raise ValueError(f"rank {facts.rank()} is not a member of {self}")
        return self.ranks.index(facts.rank())

    def included(self) -> bool | None:
        """Whether this process is a member; None where the members are not known yet. ValueError before init()."""
        return None if self.ranks is None else facts.rank() in self.ranks

    def __deepcopy__(self, memo: Any) -> ProcessSet:
        """A copy of what uses a set (a model with SyncBatchNorm) uses the same set."""
        return self

    def __reduce__(self) -> Any:
        """As its ranks; a registered set is the one of these ranks where it is unpickled, the global set stays that."""
        if self is global_process_set:
            return "global_process_set"
        if self.ranks is None:
            raise TypeError("a process set made of a communicator has no ranks before hvd.init(): it cannot be pickled")
        return (ProcessSet, (self.ranks,)) if self.process_set_id is None else (_of, (self.ranks, self.process_set_id))

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])


_registered: dict[int, list[ProcessSet]] = {}
"""The sets of the present job, by number."""


def note_registered(sets: dict[int, list[ProcessSet]]) -> None:
    """A job has begun, or ended. sets: those that are registered in it, now and later."""
    global _registered
    _registered = sets


def sets_of(given: Any) -> list[ProcessSet]:
    """The list given to `init`; none for None, nor for "dynamic", which allows to add some later. Raises ValueError
    for what is no list of ProcessSets."""
    if isinstance(given, str) and given.lower() == "dynamic":
        config.allow_dynamic_process_sets()
        return []
    sets = list(given) if isinstance(given, Iterable) else [] if given is None else [given]
    if isinstance(given, ProcessSet) or not all(isinstance(process_set, ProcessSet) for process_set in sets):
        raise ValueError(f"init(process_sets=...) takes a list of hvd.ProcessSet objects or 'dynamic', not {given!r}")
    return sets


def _of(ranks: list[int], number: int) -> ProcessSet:
    """The registered set of these ranks, if there is one; in a rank's child one with its parent's number, which has all
    that needs no communication."""
    if facts.is_child():
        found = ProcessSet(ranks)
        found.process_set_id = number
        return found
    same = [each for sets in _registered.values() for each in sets if each.ranks == ranks]
    return same[0] if same else ProcessSet(ranks)
