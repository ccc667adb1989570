"""Everything that communicates between `init()` and `shutdown()`: the only global state that a job has.

The communicator is here and in the lanes made from it, nowhere else, so that it can be replaced while the process
lives. Importing this module does not initialize MPI; `init()` does, and only where a launcher started the process: a
script started without one is a job of one and never touches MPI.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hvdlite import config
from hvdlite.algorithms import Place
from hvdlite.config import Config
from hvdlite.errors import ForkedError, HvdliteError, NotInitializedError, ShutdownError
from hvdlite.job import exits, facts, folder, logs, topology
from hvdlite.job.connect import connect
from hvdlite.job.facts import cross_rank as cross_rank
from hvdlite.job.facts import cross_size as cross_size
from hvdlite.job.facts import is_child as is_child
from hvdlite.job.facts import is_homogeneous as is_homogeneous
from hvdlite.job.facts import local_rank as local_rank
from hvdlite.job.facts import local_size as local_size
from hvdlite.job.facts import rank as rank
from hvdlite.job.facts import size as size
from hvdlite.job.groups import Group, Groups
from hvdlite.job.process_sets import ProcessSet, global_process_set, note_registered, sets_of
from hvdlite.lanes import swallowed
from hvdlite.lanes.matching import said_by
from hvdlite.lanes.observer import Observer
from hvdlite.system.user_warnings import warn
from hvdlite.system.weak_references import Crowd
from hvdlite.transports import Communicator
from hvdlite.transports.threads import ThreadTransport


class Runtime:
    """One initialized job: its topology, its settings, its process sets with their lanes."""

    def __init__(self, world: Communicator, place: topology.Topology, settings: Config) -> None:
        self.world, self.topology, self.config = world, place, settings
        self.may_share = agree_on(world, settings)
        self.observers: list[Observer] = []
        self.groups = Groups(world, place, self.place_of, self.observers)
        self.everyone = self.groups.everyone
        from hvdlite.observers import stall  # milliseconds that a mere `import hvdlite` need not pay

        self.watch = stall.watch(
            world, self.groups.lanes, settings.stall_check, settings.stall_shutdown, exits.give_up
        )
        if settings.timeline.upper() not in ("", "DYNAMIC"):
            self.trace(settings.timeline, settings.timeline_mark_cycles)
        self.attachments = Crowd()
        """Optimizers attached under this runtime; the adapters keep it."""
        self.live = False
        """Whether this is the present runtime, and this process may communicate."""
        self.comm: Any = None
        """What `init` was given."""
        self.renewables = Crowd()
        """What `renew`s in order, collectively over its `group`, when another runtime has taken this one's place."""
        self.after_join = Crowd()
        """What `give_up`s before this rank joins, and `start_over`s when all have: counts of steps must be alike."""
        self.last_looks = Crowd()
        """What is compared between the ranks once more when the job ends."""

    def place_of(self, ranks: Sequence[int]) -> Place:
        """What choosing an algorithm among these ranks depends on: a pure function of what all ranks agree on."""
        hosts = [[ranks.index(rank) for rank in host if rank in ranks] for host in self.topology.hosts]
        mine = tuple(tuple(host) for host in hosts if host)
        shares = self.may_share and any(len(host) > 1 for host in mine)
        return Place(
            len(ranks), shares, self.config.algorithm, () if len(mine) == 1 else mine,
            forced_on_gpu=self.config.algorithm_on_gpu, cuda_aware=self.config.cuda_aware,
        )  # fmt: skip

    def trace(self, path: str | None, mark_cycles: bool = False) -> None:
        """Begin a timeline in this file, or end the one there is (None). Does nothing but on rank 0."""
        if self.topology.rank == 0 and (path or self.observers):
            from hvdlite.observers import timeline

            timeline.switch(self.observers, path, mark_cycles, self.topology.size)

    @contextmanager
    def configured(self, settings: Config) -> Iterator[None]:
        """A context with other settings, for what is attached or opened inside it. Benchmarks compare settings so."""
        before, self.config = self.config, settings
        try:
            yield
        finally:
            self.config = before

    @property
    def broken(self) -> HvdliteError | None:
        """Why this job can no longer communicate, nor end in an orderly way; None while it can, and when all left."""
        reasons = [lane.closed for lane in self.groups.lanes()]
        return next((reason for reason in reasons if reason and not isinstance(reason, ShutdownError)), None)

    def close(self, look: bool) -> None:
        """Leave all lanes. look: whether this rank ends well, and brings what is compared once more. Collective; waits
        for all ranks to do the same. Raises where the job breaks meanwhile."""
        for each in self.last_looks if look else ():
            each.prepare_last_look()
        self.groups.close()
        if self.watch:
            self.watch.stop()
        self.trace(None)
        self.world.close()


def agree_on(world: Communicator, settings: Config) -> bool:
    """Whether all ranks may share memory. Raises HvdliteError where settings differ between ranks. Collective."""
    said = world.allgather_object(
        (settings.algorithm, settings.bucket_bytes, settings.gpu_operations, settings.overlap, settings.replica_check,
         settings.shared_memory)
    )  # fmt: skip
    names = ("HVDLITE_ALGORITHM", "HVDLITE_BUCKET_MB (bytes)", "HVDLITE_GPU_OPERATIONS", "HVDLITE_OVERLAP",
             "HVDLITE_REPLICA_CHECK")  # fmt: skip
    for what, values in zip(names, zip(*said, strict=True), strict=False):
        if len(set(values)) > 1:
            raise HvdliteError(f"{what} differs: {said_by(values, range(world.size))}. Set it alike everywhere.")
    return all(share for *_, share in said)


_current: Runtime | None = None
_broken: HvdliteError | None = None
when_started: list[Callable[[int], None]] = []
"""What adapters do whenever a job begins, given this process' local rank."""
when_stopped: list[Callable[[], None]] = []
"""What adapters undo whenever a job ends here."""
_forked = False


def current() -> Runtime:
    """The live runtime. Raises NotInitializedError, or ForkedError in a rank's child."""
    require_no_child()
    return known()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start communicating. Collective: every rank calls it; a second call without shutdown() keeps what is there.

    comm: None (or []) for all processes; a list of world ranks, which alone call it; or an mpi4py communicator, which
    is duplicated. process_sets: a list of ProcessSets, equal on all ranks, to register; sets made of communicators
    need a communicator for comm, and may differ between ranks. "dynamic": allow `add_process_set`.

    Raises HvdliteError when the launcher's MPI is not the one mpi4py loaded, or MPI lacks MPI_THREAD_MULTIPLE, or
    communication broke (a stall, Ctrl-C while waiting) before shutdown(), or settings differ between ranks; ValueError
    on every rank for process sets that cannot be, after which `init` may be called again; KeyError where a second call
    brings another set; ForkedError in a forked child.
    """
    global _current
    if _forked:
        raise ForkedError()
    sets = sets_of(process_sets)
    given_comm = comm if hasattr(comm, "Get_group") else None
    if given_comm is None and any(process_set.mpi_comm is not None for process_set in sets):
        raise NotImplementedError("process sets made of communicators need init(comm=...) to be a communicator, too")
    if _current is not None:
        _current.groups.find_again(sets)
        return
    if _broken:
        raise HvdliteError(f"this process can no longer communicate, start the job anew: {_broken}") from _broken
    settings = Config.from_env()
    world, place = connect(comm, settings.stall_check, stop)
    logs.configure(settings, place.rank)
    try:
        live = Runtime(world, place, settings)
    except HvdliteError:  # on all ranks
        world.close()
        exits.uninstall()
        raise
    try:
        live.groups.add_at_start(live.world, sets)
    except ValueError:
        close(live)
        raise
    _current, live.live, live.comm = live, True, comm
    facts.enter(place)
    note_registered(live.groups.registered)
    global_process_set.mpi_comm = given_comm
    swallowed.watch(place.rank)
    atexit.unregister(end)  # of an earlier job that this process has recovered from
    atexit.register(end)
    logs.tell_choice(live.everyone.eager.place, live.topology)
    logs.tell_misspelt(place.rank, config.misspelt())
    for prepare in when_started:
        prepare(live.topology.local_rank)


def shutdown() -> None:
    """Stop communicating; waits for all ranks to do the same. Later `init()` starts anew. Safe to call twice."""
    error, counted = sys.exc_info()[1], exits.guarded()
    stop(look=error is None)
    if isinstance(error, ShutdownError) and counted:  # in a `finally`
        folder.stopped()


def stop(look: bool = False) -> None:
    """`shutdown`, by whoever goes on. look: whether this rank ends well."""
    global _current, _broken
    if _current is None or _forked or exits.ending:
        return
    ending, _current, exits.leaving = _current, None, True
    ending.live = False
    facts.leave()
    note_registered({})
    swallowed.leave()
    try:
        close(ending, look)
    except BaseException as error:  # Ctrl-C: the others wait for what will not come any more
        _broken = ending.broken or HvdliteError(f"hvd.shutdown() was interrupted ({type(error).__name__}: {error})")
        raise
    finally:
        for undo in when_stopped:
            undo()
    _broken = ending.broken
    if not (_broken or swallowed.found()):
        atexit.unregister(end)


def close(ending: Runtime, look: bool = False) -> None:
    """Leave everything, unless that can no longer be done."""
    if not ending.broken:
        ending.close(look)
        exits.uninstall()
    global_process_set.ranks, global_process_set.mpi_comm = [], None


def end() -> None:
    """At the process' exit: shut down; where communication broke, MPI cannot be finalized, and the job is aborted.
    While hvdliterun ends the job, others may have gone, and nothing is waited for. Where the script has caught the
    error by which it learned that another rank has left, say so."""
    reason: BaseException | None = None
    try:
        exits.ending |= folder.job_is_ending()
        if not exits.ending:
            exits.tell_of_uncaught()
        stop(look=True)
    except BaseException as error:  # Ctrl-C, too
        if not exits.guarded():  # nobody waits for this process
            raise
        reason = error
        exits.ending |= folder.job_is_ending()
    if _forked or exits.ending:
        return
    if reason := _broken or reason:
        exits.give_up(f"ended after communication broke: {str(reason) or type(reason).__name__}", at_exit=True)
    if told := swallowed.found():
        exits.tell_of_swallowed(told)


def is_initialized() -> bool:
    """Whether `init` was called, here or in the rank that this process is a child of."""
    return _current is not None or is_child()


def known() -> Runtime:
    """The runtime, also in a forked process. Raises NotInitializedError."""
    live = _current  # read once: another thread may shut down meanwhile. AutoGraph warns of walruses
    if live is None:
        raise NotInitializedError()
    return live


def group_of(process_set: ProcessSet | None) -> Group:
    """The set's members and lanes; everyone for None. Raises ValueError where this process may not use it."""
    if process_set is None or process_set is global_process_set:
        return current().everyone
    return current().groups.of(process_set)


def replica_check(given: str | None) -> str:
    """What happens where ranks train different models. given: the user's argument; None for the job's setting. Raises
    ValueError for an argument that is none of `config.REPLICA_CHECKS`."""
    if given is None:
        return current().config.replica_check
    if given not in config.REPLICA_CHECKS:
        choices = ", ".join(f'"{each}"' for each in config.REPLICA_CHECKS)
        raise ValueError(f"replica_check={given!r} must be one of {choices}, or None for HVDLITE_REPLICA_CHECK")
    return given


def require_no_child() -> None:
    """Raises ForkedError in a rank's child, forked after init() or started anew."""
    if _forked or (_current is None and is_child()):
        raise ForkedError()


def require_attached(alive: bool, shared: bool, least: int = 2, lost: str = "gradients would not be reduced") -> None:
    """Raises RuntimeError for an optimizer that is not `alive` under the present runtime, if that has `least` ranks;
    ForkedError in a rank's child. Warns where it was `shared` with other ranks, and there is no runtime."""
    require_no_child()
    if _current is None and shared:
        warn("after hvd.shutdown() each rank trains by itself", RuntimeWarning)
    if not alive and is_initialized() and size() >= least:
        again = "call hvd.DistributedOptimizer(optimizer) again after hvd.init()"
        raise RuntimeError(f"this optimizer was attached before hvd.shutdown(): {again}, or {lost}.")


def _after_fork() -> None:
    """In a forked child nothing may touch MPI, nor wait for the parent's threads. (Without MPI both go on.)"""
    global _forked
    if _current is None:
        return
    if isinstance(_current.world, ThreadTransport):
        for lane in _current.groups.lanes():
            lane.go_on(ForkedError())
    else:
        _forked, _current.live = True, False
        for lane in _current.groups.lanes():
            lane.orphan(ForkedError())
        for attachment in _current.attachments:
            attachment.gradients.let_go()


os.register_at_fork(after_in_child=_after_fork)
if is_child():
    global_process_set.process_set_id, global_process_set.ranks = 0, list(range(size()))
