"""Adding and removing process sets while the job runs. The names and rules are Horovod's."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite import config
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a set of ranks; returns it. Collective over the whole job, members or not, in the same order everywhere.

    Raises ValueError where sets may not be added (see `init`), for ranks that cannot be or are another set's, and
    MismatchError on every rank where ranks differ in what they add; NotImplementedError for communicators.
    """
    wanted = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    live = changeable()
    if wanted.mpi_comm is not None:
        raise NotImplementedError("a process set made of a communicator can only be given to hvd.init()")
    if wanted.process_set_id is not None:
        raise ValueError(f"{wanted} is registered already")
    live.groups.add(wanted)
    return wanted


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a set, whose pending operations fail; it may be added again. Collective over the whole job.

    False, at once, for the global set and for one that is not registered. Raises ValueError as `add_process_set`.
    """
    return changeable().groups.remove(process_set)


def changeable() -> runtime.Runtime:
    """The runtime, if its process sets may change. Raises ValueError where they may not."""
    live = runtime.current()
    if not (live.dynamic or config.dynamic_process_sets()):
        raise ValueError("process sets may change only after hvd.init(process_sets='dynamic'), or with "
                         "HVDLITE_DYNAMIC_PROCESS_SETS=1 in the environment")
    return live
