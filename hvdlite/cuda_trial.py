"""`python -m hvdlite.cuda_trial`: one of two processes that test whether MPI can send GPU memory.

`hvdlite.transports.cuda_aware` starts both processes and reads their output, because they may crash.
"""

from __future__ import annotations

import signal
import sys

import numpy as np

from hvdlite.arrays import cupy
from hvdlite.job import runtime
from hvdlite.transports.cuda_aware import PASSED, SECONDS, STARTED

LENGTHS = (3, 5000, 300_000)  # of float64 arrays; MPI has another protocol for each of these sizes


def main() -> None:
    """Exchange arrays on the GPU with the other process, and exit with an error if they arrive wrong."""
    xp = cupy()  # before MPI, which needs the driver's library
    signal.alarm(SECONDS)
    runtime.init()
    world = runtime.current().world
    other = 1 - world.rank
    xp.zeros(max(LENGTHS), np.float64)
    print(STARTED, flush=True)
    for length in LENGTHS:
        mine, theirs = (np.arange(length, dtype=np.float64) + 1000 * rank for rank in (world.rank, other))
        sent, received = xp.asarray(mine), xp.zeros(length, np.float64)
        xp.cuda.get_current_stream().synchronize()
        world.exchange(sent, other, received, other)
        if not np.array_equal(received.get(), theirs):
            sys.exit(f"rank {world.rank}: {length} elements arrived with wrong values")
    print(PASSED, flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    main()
