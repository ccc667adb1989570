"""One rank of a test job: `python -m tests.parallel.runner MODULE[.CHECK] ...`, under mpiexec.

The rank runs `check_*` functions in order, with a barrier between them on a communicator of its own. So a check that
leaves hvdlite in disorder does not affect the barrier.

A check that fails prints its rank and traceback and ends the job, so no rank waits. faulthandler ends a check that
hangs, and prints every thread's stack. Rank 0 announces the begin and end of each check on lines that start with MARK,
which the parent reads.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

MARK = "@check"
SECONDS = 60  # for one check: ten times the longest one, on a busy machine


def checks(name: str) -> dict[str, Callable[[], None]]:
    """The check of this name, or all checks of a module in order. "gpu/MODULE" is in tests/gpu."""
    folder, _, rest = name.rpartition("/")
    module_name, _, wanted = rest.partition(".")
    module = importlib.import_module(f"tests.{folder or 'parallel'}.ranks.{module_name}")
    names = [wanted] if wanted else [key for key in vars(module) if key.startswith("check_")]
    return {f"{module_name}.{key}": getattr(module, key) for key in names}


def main(names: Sequence[str]) -> None:
    import hvdlite as hvd

    if where := os.environ.get("TORCH_TENSORS_ON"):
        importlib.import_module("tests.gpu.torch_device").install(where)
    if where := os.environ.get("TENSORFLOW_TENSORS_ON"):
        importlib.import_module("tests.gpu.tensorflow_device").install(where)
    hvd.init()
    rank, world = hvd.rank(), None
    if hvd.size() > 1:
        from mpi4py import MPI

        world = MPI.COMM_WORLD.Dup()
    for name, check in ((name, check) for given in names for name, check in checks(given).items()):
        if hvd.size() not in getattr(check, "sizes", (hvd.size(),)):
            continue
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        tell(rank, "begin", name)
        began = time.perf_counter()
        try:
            check()
        except BaseException:
            fail(rank, name)
        if "tensorflow" in sys.modules:
            tidy()
        if world is not None:
            world.Barrier()
        faulthandler.cancel_dump_traceback_later()  # the next check may import modules from a cold disk
        tell(rank, "passed", f"{name} {time.perf_counter() - began:.2f}")
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    hvd.shutdown()
    faulthandler.cancel_dump_traceback_later()
    tell(rank, "finished", "all")


def tidy() -> None:
    """Collect the garbage of a check.

    When an iterator of tf.data is freed, its tuning thread sometimes misses the cancellation, which is announced before
    it can be seen (TensorFlow 2.21). The thread that frees the iterator then waits as long again as the iterator has
    lived. Early that is short. Later it took up to 40 s, in an unrelated check.
    """
    gc.collect()
    gc.freeze()  # TensorFlow's own objects are not looked at again, which saves 0.2 s


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
    main(sys.argv[1:])
