"""Benchmarks for users: `hvdliterun -np 2 python -m hvdlite.bench allreduce` (or `step`).

Belongs here: programs that time hvdlite beside other libraries, and their reports. Not here: tests, and the results,
which are in MEASURED.md and docs/about/benchmarks.md. The contenders take turns in one run, so that a slow minute of
the machine affects all of them. This room may import MPI and torch, since it compares hvdlite with them.

    __main__                                    the command line
    allreduce  collectives  step  keras_step  fsdp  memory  overlap  compression     one benchmark each
    model                                       predicts, and measures nothing
    contenders  gpu  tasks  models  elsewhere   the things to be timed
    problems                                    what `compression` learns
    timing  network  schedule                   how to time them
    progress                                    how far a run has come
    report  saved                               tables, JSON
    drawing  plot  style                        figures: which, what they show, how they look
"""

from __future__ import annotations

import sys

import mpi4py

from hvdlite.job.connect import no_library

mpi4py.rc.initialize, mpi4py.rc.finalize = False, False  # hvd.init() does it; `--help` and the model need no MPI
try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as error:
    sys.exit(no_library(error))
