"""The job of this process: `init()` begins it, `shutdown()` ends it, `current()` returns it.

The job's communicator is here and in the lanes made from it, nowhere else, so that it can be replaced while the process
lives. Importing this module does not initialize MPI. `init()` uses MPI if a launcher started the process, if the script
has initialized MPI, or if `comm` names ranks. Otherwise the job has one rank, and no MPI.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

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
from hvdlite.job.observers import Observers
from hvdlite.job.process_sets import (
    Given,
    ProcessSet,
    global_process_set,
    is_communicator,
    is_dynamic,
    note_registered,
    sets_of,
)
from hvdlite.job.registries import Registries
from hvdlite.lanes import swallowed
from hvdlite.lanes.matching import said_by
from hvdlite.system.user_warnings import warn
from hvdlite.transports import Communicator
from hvdlite.transports.threads import ThreadTransport


class Runtime:
    """One initialized job.

    Attributes:
        world: The communicator of all ranks.
        topology: The hosts of all ranks.
        config: The job's settings.
        comm: The argument of `init`.
        may_share: Whether ranks of one host may share memory.
        observers: The observers of all lanes, and the stall watch.
        groups: The process sets, with their lanes.
        everyone: The group of all ranks.
        registries: The objects that take part in restart, `join()` and the job's end.
        live: Whether this is the present job, and this process may communicate.
        neighbors: The topology that the user has set for `neighbor_allreduce`; None for the default.
    """

    def __init__(
        self, world: Communicator, place: topology.Topology, settings: Config, comm: Given, began: float
    ) -> None:
        """Collective. began: when `init` began, by `time.monotonic`."""
        self.world = world
        self.topology = place
        self.config = settings
        self.comm = comm
        self.may_share = agree_on(world, settings)
        self.observers = Observers(world.tally.sent, began)
        self.groups = Groups(world, place, self.place_of, self.observers.listening)
        self.everyone = self.groups.everyone
        self.observers.start_watch(world, self.groups.lanes, settings)
        self.registries = Registries()
        self.live = False
        self.neighbors: object = None
        if settings.timeline.from_start:
            self.trace(settings.timeline.path, settings.timeline.mark_cycles)

    def place_of(self, ranks: Sequence[int]) -> Place:
        """The facts from which an algorithm is chosen for a group of these ranks. They are equal on all ranks."""
        hosts = [[ranks.index(rank) for rank in host if rank in ranks] for host in self.topology.hosts]
        mine = tuple(tuple(host) for host in hosts if host)
        shares = self.may_share and any(len(host) > 1 for host in mine)
        return Place(
            len(ranks), shares, self.config.algorithm, () if len(mine) == 1 else mine,
            forced_on_gpu=self.config.algorithm_on_gpu, cuda_aware=self.config.cuda_aware,
        )  # fmt: skip

    def begin(self) -> None:
        """This is the present job now."""
        self.live = True
        self.observers.steps.start()

    def end(self) -> None:
        """This process may no longer communicate in this job."""
        self.live = False

    def set_neighbors(self, topology: object) -> None:
        """Keep the user's topology."""
        self.neighbors = topology

    @property
    def dynamic(self) -> bool:
        """Whether an `init` of this process has allowed that process sets are added and removed."""
        return _dynamic

    def trace(self, path: str | None, mark_cycles: bool = False) -> None:
        """Begin a timeline in this file, or end the present one (None). Only rank 0 has a timeline."""
        if self.topology.rank == 0:
            self.observers.trace(path, mark_cycles, self.topology.size)

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
        """The reason why this job can neither communicate nor end in order; None if it can, or if all ranks left."""
        reasons = [lane.closed for lane in self.groups.lanes()]
        return next((reason for reason in reasons if reason and not isinstance(reason, ShutdownError)), None)

    def close(self, look: bool) -> None:
        """Leave all lanes. Collective; waits for all ranks. Raises if the job breaks meanwhile.

        Args:
            look: Whether this rank ends well, and its values are compared with other ranks' once more.
        """
        if look:
            self.registries.prepare_last_looks()
        self.groups.close()
        self.observers.stop_watch()
        self.trace(None)
        self.world.close()


def agree_on(world: Communicator, settings: Config) -> bool:
    """Whether all ranks may share memory. Collective.

    Raises:
        HvdliteError: On every rank, if settings differ between ranks. The message has each rank's value.
    """
    said = world.allgather_object(
        (settings.algorithm, settings.bucket_bytes, settings.gpu_operations, settings.overlap, settings.replica_check,
         settings.compress_within_host, settings.summary, settings.shared_memory)
    )  # fmt: skip
    names = ("HVDLITE_ALGORITHM", "HVDLITE_BUCKET_MB (bytes)", "HVDLITE_GPU_OPERATIONS", "HVDLITE_OVERLAP",
             "HVDLITE_REPLICA_CHECK", "HVDLITE_COMPRESS_WITHIN_HOST", "HVDLITE_SUMMARY")  # fmt: skip
    for name, values in zip(names, zip(*said, strict=True), strict=False):
        if len(set(values)) > 1:
            raise HvdliteError(
                f"{name} differs: {said_by(values, range(world.size))}. Set it to one value on all ranks. [HVD109]"
            )
    return all(share for *_, share in said)


_current: Runtime | None = None
_broken: HvdliteError | None = None
"""The reason why this process cannot communicate any more."""
when_started: list[Callable[[int], None]] = []
"""Called when a job begins, with this process' local rank. Modules add their functions when they are imported, or when
a user attaches an optimizer. That may be long before `init()`."""
when_stopped: list[Callable[[], None]] = []
"""Called when a job ends here."""
_forked = False
_dynamic = False
"""Whether an `init` of this process has allowed that process sets are added and removed. It lasts, as in Horovod."""


def current() -> Runtime:
    """The present job.

    Raises:
        NotInitializedError: There is none.
        ForkedError: This process is a child of a rank.
    """
    require_no_child()
    return known()


def known() -> Runtime:
    """The present job, also in a forked child.

    Raises:
        NotInitializedError: There is none.
    """
    live = _current  # read once: another thread may shut down meanwhile. AutoGraph warns of walruses
    if live is None:
        raise NotInitializedError()
    return live


def is_initialized() -> bool:
    """Whether `init` has been called, in this process or in the rank that started it."""
    return _current is not None or is_child()


def init(comm: Given = None, process_sets: Iterable[ProcessSet] | str | None = None) -> None:
    """Start communicating. Collective: waits for all ranks. A second call without shutdown() changes nothing.

    Args:
        comm: None or an empty list for all processes; a list of ranks of MPI_COMM_WORLD, which alone make the call; or
            an mpi4py communicator, which hvdlite duplicates.
        process_sets: ProcessSets to register, equal on all ranks; or "dynamic", to allow `add_process_set`. Sets made
            of communicators need a communicator as `comm`, and may differ between ranks.

    Raises:
        HvdliteError: The message has the cause and the cure. mpi4py may have loaded another MPI than the launcher's.
            Settings may differ between ranks. Communication may have broken earlier in this process.
        ValueError: On every rank, for impossible process sets. `init` may be called again afterwards.
        KeyError: A second call names a process set that does not exist.
        ForkedError: This process is a forked child of a rank.
    """
    global _current, _dynamic
    began = time.monotonic()
    if _forked:
        raise ForkedError()
    sets = sets_of(process_sets)
    given_comm = comm if is_communicator(comm) else None
    if given_comm is None and any(process_set.mpi_comm is not None for process_set in sets):
        raise NotImplementedError("process sets made of communicators need init(comm=...) to be a communicator, too")
    _dynamic |= is_dynamic(process_sets)
    if _current is not None:
        _current.groups.find_again(sets)
        return
    if _broken:
        raise HvdliteError(
            f"this process can no longer communicate, start the job again [HVD209]: {_broken}"
        ) from _broken
    settings = Config.from_env()
    world, place = connect(comm, settings.stall.check, stop)
    logs.configure(settings.log, place.rank)
    try:
        live = Runtime(world, place, settings, comm, began)
    except HvdliteError:  # on all ranks
        world.close()
        exits.uninstall()
        raise
    try:
        live.groups.add_at_start(live.world, sets)
    except ValueError:
        close(live)
        raise
    _current = live
    live.begin()
    facts.enter(place)
    note_registered(live.groups.registered)
    global_process_set._stand_for(given_comm)
    swallowed.watch(place.rank)
    atexit.unregister(end)  # of an earlier job, after which this process has recovered
    atexit.register(end)
    logs.log_choice(live.everyone.eager.place, live.topology)
    logs.warn_of_misspelt(place.rank, config.misspelt())
    for prepare in when_started:
        prepare(live.topology.local_rank)


def shutdown() -> None:
    """Stop communicating. Collective: waits for all ranks. `init()` may be called again; a second call does nothing."""
    error, counted = sys.exc_info()[1], exits.is_guarded()
    stop(look=error is None)
    if isinstance(error, ShutdownError) and counted:  # in a `finally`
        folder.stopped()


def stop(look: bool = False) -> None:
    """End the present job, if there is one. Collective; waits for all ranks.

    Args:
        look: Whether this rank ends well, and its values are compared with other ranks' once more.
    """
    global _current, _broken
    if _current is None or _forked or exits.is_ending():
        return
    ending, _current = _current, None
    exits.begin_leaving()
    ending.end()
    facts.leave()
    note_registered({})
    swallowed.leave()
    try:
        close(ending, look)
    except BaseException as error:  # Ctrl-C, say: the other ranks wait for this one in vain
        _broken = ending.broken or HvdliteError(f"hvd.shutdown() was interrupted ({type(error).__name__}: {error})")
        raise
    finally:
        for undo in when_stopped:
            undo()
    _broken = ending.broken
    if not (_broken or swallowed.found()):
        atexit.unregister(end)


def close(ending: Runtime, look: bool = False) -> None:
    """Leave all lanes, unless communication is broken. `look`: see `stop`."""
    if not ending.broken:
        ending.close(look)
        exits.uninstall()
    global_process_set._clear()


def end() -> None:
    """At the process' exit: shut down, or abort the job if communication broke, since MPI cannot be finalized then.

    While hvdliterun ends the job, other ranks may have ended, so this process does not wait for them. If the script has
    caught the error by which it learned that another rank has left, report that error.
    """
    reason: BaseException | None = None
    try:
        note_ending_job()
        if not exits.is_ending():
            exits.end_for_uncaught()
        stop(look=True)
    except BaseException as error:  # Ctrl-C, too
        if not exits.is_guarded():  # no other rank counts on this process
            raise
        reason = error
        note_ending_job()
    if _forked or exits.is_ending():
        return
    if reason := _broken or reason:
        exits.give_up(f"ended after communication broke: {str(reason) or type(reason).__name__}", at_exit=True)
    if error_text := swallowed.found():
        exits.report_swallowed(error_text)


def note_ending_job() -> None:
    """Note it if hvdliterun ends the job."""
    if folder.job_is_ending():
        exits.begin_ending()


def end_step(who: int) -> None:
    """A training step ends on this rank, if there is a job.

    Args:
        who: Tells apart what ends it: the id() of an optimizer. A step that several objects end counts once.
    """
    live = _current
    if live is not None and not _forked:
        live.observers.steps.end(who)


def group_of(process_set: ProcessSet | None) -> Group:
    """The group of a process set; everyone's for None.

    Raises:
        ValueError: The set is not registered, or this process is not a member.
    """
    if process_set is None or process_set is global_process_set:
        return current().everyone
    return current().groups.of(process_set)


def replica_check(given: str | None) -> str:
    """The reaction if ranks train different models, one of `config.REPLICA_CHECKS`.

    Args:
        given: The user's argument; None for the job's setting.

    Raises:
        ValueError: The argument is another word.
    """
    if given is None:
        return current().config.replica_check
    if given not in config.REPLICA_CHECKS:
        choices = ", ".join(f'"{each}"' for each in config.REPLICA_CHECKS)
        raise ValueError(f"replica_check={given!r} must be one of {choices}, or None for HVDLITE_REPLICA_CHECK")
    return given


def require_no_child() -> None:
    """Check that this process is not a child of a rank.

    Raises:
        ForkedError: A rank has forked this process after init(), or started it.
    """
    if _forked or (_current is None and is_child()):
        raise ForkedError()


def require_attached(alive: bool, shared: bool, least: int = 2, lost: str = "gradients would not be reduced") -> None:
    """Check that an optimizer reduces gradients. Warns if its job has ended, and it shared its gradients.

    Args:
        alive: Whether the optimizer is attached under the present job.
        shared: Whether it was attached with other ranks.
        least: The number of ranks from which on it must be attached.
        lost: What happens otherwise, in words.

    Raises:
        RuntimeError: The optimizer is not attached, and the job has at least `least` ranks.
        ForkedError: This process is a child of a rank.
    """
    require_no_child()
    if _current is None and shared:
        warn("after hvd.shutdown() each rank trains by itself", RuntimeWarning)
    if not alive and is_initialized() and size() >= least:
        again = "call hvd.DistributedOptimizer(optimizer) again after hvd.init()"
        raise RuntimeError(f"this optimizer was attached before hvd.shutdown(): {again}, or {lost}. [HVD304]")


def _after_fork() -> None:
    """In a forked child: use neither MPI nor the parent's threads. A job without MPI goes on in parent and child."""
    global _forked
    if _current is None:
        return
    if isinstance(_current.world, ThreadTransport):
        _current.observers.meter.go_on_in_child()
        for lane in _current.groups.lanes():
            lane.go_on(ForkedError())
    else:
        _forked = True
        _current.end()
        for lane in _current.groups.lanes():
            lane.orphan(ForkedError())
        _current.registries.let_go()


os.register_at_fork(after_in_child=_after_fork)
