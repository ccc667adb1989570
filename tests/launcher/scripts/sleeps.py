"""An MPI program without `hvdlite.job.exits` tells what there is to clean up, and sleeps. "deaf" ignores signals."""

import os
import signal
import sys
import time

from mpi4py import MPI

if "deaf" in sys.argv:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
MPI.COMM_WORLD.Barrier()
if MPI.COMM_WORLD.rank == 0:
    with open("/proc/self/maps") as maps:
        segments = {line.split()[5] for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
    time.sleep(0.3)
    print("ready", os.environ.get("HVDLITE_JOB_DIR", "-"), *segments, flush=True)
time.sleep(60)
