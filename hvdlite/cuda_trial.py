"""`python -m hvdlite.cuda_trial`: one of two processes that try whether the MPI takes GPU memory.

`hvdlite.transports.cuda_aware` starts them and reads what they print. They may crash.
"""

from __future__ import annotations

import signal
import sys

import numpy as np

from hvdlite.arrays import cupy
from hvdlite.job import runtime
from hvdlite.transports.cuda_aware import PASSED, SECONDS, STARTED

LENGTHS = (3, 5000, 300_000)  # float64: sent at once, in pieces, and by agreement


def main() -> None:
    """One of the two processes: exchange device arrays with the other, and look at them."""
    xp = cupy()  # before MPI, which then finds the driver's library
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
            sys.exit(f"{length} elements arrived wrong")
    print(PASSED, flush=True)
    runtime.shutdown()


if __name__ == "__main__":
    main()
