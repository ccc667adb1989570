"""One rank of a test job: `python -m tests.parallel.runner MODULE [CHECK ...]`, under mpiexec.

Runs the module's `check_*` functions in order on all ranks, with a barrier between them, on a communicator of its own
(a check that leaves hvdlite in disorder is still told apart from the next). A check that fails prints its rank and
traceback and ends the job, so nobody waits; one that hangs is ended by faulthandler, which prints every thread's
stack. Rank 0 announces each check's begin and end on lines that start with MARK: the parent reads them.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType

MARK = "@check"
SECONDS = 40  # for one check: ten times the longest, on a busy machine


def checks(module: ModuleType, names: Sequence[str]) -> list[Callable[[], None]]:
    """The module's checks in its order; only the named ones where names are given."""
    found = [value for name, value in vars(module).items() if name.startswith("check_")]
    return [check for check in found if not names or check.__name__ in names]


def main(module_name: str, names: Sequence[str]) -> None:
    import hvdlite as hvd

    hvd.init()
    rank, world = hvd.rank(), None
    if hvd.size() > 1:
        from mpi4py import MPI

        world = MPI.COMM_WORLD.Dup()
    module = importlib.import_module(f"tests.parallel.ranks.{module_name}")
    for check in checks(module, names):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        tell(rank, "begin", check.__name__)
        began = time.perf_counter()
        try:
            check()
        except BaseException:
            fail(rank, check.__name__)
        if world is not None:
            world.Barrier()
        tell(rank, "passed", f"{check.__name__} {time.perf_counter() - began:.2f}")
    faulthandler.cancel_dump_traceback_later()
    hvd.shutdown()
    tell(rank, "finished", module_name)


def tell(rank: int, what: str, who: str) -> None:
    if rank == 0:
        print(f"{MARK} {what} {who}", flush=True)


def fail(rank: int, check: str) -> None:
    """Print the traceback and end the job, after a moment in which other ranks can print theirs."""
    sys.stdout.flush()
    sys.stderr.write(f"rank {rank} failed in {check}:\n{traceback.format_exc()}\n")
    sys.stderr.flush()
    time.sleep(0.5)
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(1)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
