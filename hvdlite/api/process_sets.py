"""Adding and removing process sets while the job runs, with Horovod's names and rules."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite import config
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set. Collective over all ranks of the job, members or not, in the same order on every rank.

    Args:
        process_set: A set, or its global ranks.

    Returns:
        The set.

    Raises:
        ValueError: Sets may not change after this `init()`, a rank does not exist or is repeated, or another set has
            the same ranks.
        MismatchError: The ranks add different sets. Every rank raises it.
        NotImplementedError: The set is made of a communicator.
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
    """Remove a process set. Collective over all ranks of the job, members or not.

    Pending operations of the set fail. The set may be added again.

    Args:
        process_set: The set.

    Returns:
        True. False, without waiting, for the global set and for a set that is not registered.

    Raises:
        ValueError: Sets may not change after this `init()`.
        MismatchError: The ranks remove different sets. Every rank raises it.
    """
    return changeable().groups.remove(process_set)


def changeable() -> runtime.Runtime:
    """Return the runtime. Raises ValueError if its process sets may not change."""
    live = runtime.current()
    if not (live.dynamic or config.dynamic_process_sets()):
        raise ValueError(
            "process sets may change only after hvd.init(process_sets='dynamic'), or with "
            "HVDLITE_DYNAMIC_PROCESS_SETS=1 in the environment"
        )
    return live
