"""Where this process is in its job: its rank, the number of ranks, and the like.

`runtime` enters the place when a job begins, and leaves it when the job ends. A child of a rank, however it was
started, knows the place of its parent, and may ask for it; it cannot communicate.
"""

from __future__ import annotations

from dataclasses import fields

from hvdlite.errors import NotInitializedError
from hvdlite.job.topology import Topology
from hvdlite.system import launcher_environment
from hvdlite.system.launcher_environment import Parent

_here: Topology | None = None
_parent = launcher_environment.parent()
"""The place of the rank that this process is a child of (spawned, or from a forkserver)."""


def enter(here: Topology) -> None:
    """A job has begun. Children that this process starts from now on know its place."""
    global _here
    _here = here
    launcher_environment.mark_place(Parent(**{field.name: getattr(here, field.name) for field in fields(Parent)}))


def leave() -> None:
    """The job has ended for this process."""
    global _here
    _here = None
    launcher_environment.mark_place(None)


def is_child() -> bool:
    """Whether this process cannot be a rank, since a rank started it.

    A child of a job of one without a launcher may become a job of one itself.
    """
    return _here is None and _parent is not None and launcher_environment.rank_that_was_meant() is not None


def place() -> Topology | Parent:
    """Return the place of this rank, or of the rank that this process is a child of.

    Raises:
        NotInitializedError: `hvd.init()` has not been called, or `hvd.shutdown()` has.
    """
    here, parent = _here, _parent  # read once: another thread may shut down meanwhile
    found = parent if here is None else here
    if found is None:
        raise NotInitializedError()
    return found


def rank() -> int:
    """This process' number among all, from 0. This and the like raise NotInitializedError, a ValueError, before
    `init()`."""
    return place().rank


def size() -> int:
    """The number of processes."""
    return place().size


def local_rank() -> int:
    """This process' number among those of its host."""
    return place().local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """This process' number among those with its local rank on all hosts."""
    return place().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return place().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return place().homogeneous
