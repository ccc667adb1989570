"""The place of this process in its job: its rank, the number of ranks, and the like.

`runtime` calls `enter` when a job begins, and `leave` when the job ends. In a child process of a rank these functions
return the parent's values. Such a child cannot communicate.
"""

from __future__ import annotations

from dataclasses import fields

from hvdlite.errors import NotInitializedError
from hvdlite.job.topology import Topology
from hvdlite.system import launcher_environment
from hvdlite.system.launcher_environment import Parent

_here: Topology | None = None
_last_rank: int | None = None
"""This process' rank in its latest job; None before the first `init()`."""
_parent = launcher_environment.parent()
"""The place of the rank that started this process; None if no rank did."""


def enter(here: Topology) -> None:
    """A job has begun. Processes that this one starts from now on get its place through the environment."""
    global _here, _last_rank
    _here, _last_rank = here, here.rank
    launcher_environment.mark_place(Parent(**{field.name: getattr(here, field.name) for field in fields(Parent)}))


def leave() -> None:
    """The job has ended in this process."""
    global _here
    _here = None
    launcher_environment.mark_place(None)


def is_child() -> bool:
    """Whether a rank started this process, so that it cannot be a rank itself.

    False in a child of a job without a launcher: that child may call `init()`.
    """
    return _here is None and _parent is not None and launcher_environment.rank_that_was_meant() is not None


def place() -> Topology | Parent:
    """The place of this rank, or of the rank that started this process.

    Raises:
        NotInitializedError: `hvd.init()` has not been called, or `hvd.shutdown()` has.
    """
    here, parent = _here, _parent  # read once: another thread may shut down meanwhile
    found = parent if here is None else here
    if found is None:
        raise NotInitializedError()
    return found


def rank() -> int:
    """This process' number among all, from 0. All of these functions raise NotInitializedError before `init()`."""
    return place().rank


def last_rank() -> int:
    """As `rank()`. After `shutdown()`, the rank in the job that has ended."""
    last = _last_rank  # read once, as in `place`
    return rank() if last is None or _here is not None else last


def presumed_rank() -> int:
    """As `last_rank()`. Before `init()`, the rank that a launcher announces; 0 if none does."""
    try:
        return last_rank()
    except NotInitializedError:
        return launcher_environment.announced_rank() or 0


def size() -> int:
    """The number of processes."""
    return place().size


def local_rank() -> int:
    """This process' number among the processes of its host, from 0."""
    return place().local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return place().local_size


def cross_rank() -> int:
    """This process' number among the processes of all hosts with the same local rank, from 0."""
    return place().cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return place().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return place().homogeneous
