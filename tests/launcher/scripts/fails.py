"""Rank 1, or rank 2 too, ends as the argument says; the others wait in a barrier. `hvdlite.job.exits` is installed."""

import atexit
import os
import sys
import threading
import time

from mpi4py import MPI

from hvdlite.job import exits

WORLD = MPI.COMM_WORLD
with open("/proc/self/maps") as maps:
    SEGMENTS = {line.split()[5] for line in maps if "/dev/shm/" in line and "(deleted)" not in line}
WORLD.Barrier()
exits.install(WORLD.Abort, WORLD.rank, lambda: None)
atexit.register(exits.uninstall)


def fail() -> None:
    raise ValueError("no such luck")


def end(how: str) -> None:
    if how == "exception":
        fail()
    elif how == "thread":
        threading.Thread(target=fail).start()
    elif how == "exit-of-thread":
        thread = threading.Thread(target=sys.exit, args=(3,))
        thread.start()
        thread.join()
    elif how == "exit":
        sys.exit(7)
    elif how == "exit-message":
        sys.exit("farewell")
    elif how == "raise":
        raise SystemExit(7)
    elif how == "caught":
        try:
            sys.exit(7)
        except SystemExit as error:
            assert error.code == 7
    elif how.startswith("signal"):
        os.kill(os.getpid(), int(how.removeprefix("signal")))
    elif how == "uninstalled":
        exits.uninstall()
        assert SystemExit(3).code == 3
        assert sys.version_info < (3, 12) or type(sys.exit).__name__ == "builtin_function_or_method"


ends, how = range(1, 2), sys.argv[1]
if how == "wait":
    WORLD.Barrier()
    if WORLD.rank == 0:
        print("waiting", *SEGMENTS, flush=True)
    time.sleep(60)
else:
    if how.startswith("all-"):
        ends, how = range(WORLD.size), how.removeprefix("all-")
    if WORLD.rank in ends:
        print("last words")
        end(how)
    WORLD.Barrier()
    if how == "zero":
        sys.exit(0)
