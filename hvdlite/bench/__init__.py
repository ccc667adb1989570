"""Benchmarks for users: `hvdliterun -np 2 python -m hvdlite.bench allreduce` (or `step`).

The contenders take turns in one run, so that a slow minute of the machine affects all of them. This package may import
MPI and torch, since it compares hvdlite with them.
"""

from __future__ import annotations

import sys

import mpi4py

from hvdlite.job.connect import no_library

mpi4py.rc.initialize, mpi4py.rc.finalize = False, False  # `--help` and the model need none; hvd.init() does it
try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    sys.exit(no_library(error))
