"""Outlives hvdliterun, however that dies, and leaves nothing of the job.

`python janitor.py ID FOLDER SHARED`. Its stdin is a pipe whose other end hvdliterun holds. When that
closes, be it by a normal end or SIGKILL, the janitor kills every process that carries the job's mark in
its environment, and removes the job's two folders and the segments that MPICH made for it. There is no
other code that cleans up: the way that must work after a crash is the way of every job.

MPICH offers no choice of folder for its segment, and keeps the file for the life of the job. It is
ours to remove if a process of this job maps it: looked up while the job runs, never by name alone.
Not removed: the few KB of /tmp/hydra_hwloc_xmlfile_* that Hydra leaves when it is killed or told to
abort, since nothing says whose they are.
Runs as a script, in a session of its own, and imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator

_SEGMENT = "/dev/shm/mpich_shm_"
_PATIENCE = 3.0  # seconds until killed processes must be gone


def main(job: str, folder: str, shared: str) -> None:
    """Wait for the end of stdin, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; our sign is the pipe
    segments: set[str] = set()
    pause = 0.05
    while not select.select([0], [], [], pause)[0]:
        segments |= segments_of_ranks(folder)
        pause = min(pause * 1.2, 5.0)
    segments |= segments_of_ranks(folder)
    kill_all(f"HVDLITE_JOB_ID={job}".encode())
    for path in segments:
        with contextlib.suppress(OSError):
            os.unlink(path)
    for tree in filter(None, (shared, folder)):
        shutil.rmtree(tree, ignore_errors=True)


def marked(mark: bytes) -> Iterator[int]:
    """The processes that have `mark` ("NAME=value") in their environment; not this one."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as environ:
                if mark in environ.read().split(b"\0"):
                    yield int(entry)


def kill_all(mark: bytes) -> None:
    """Kill every process that has `mark`, and wait until none is left."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        found = list(marked(mark))
        if not found:
            return
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def segments_of_ranks(folder: str) -> set[str]:
    """MPICH's segments that ranks of the job with this folder map now."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith("pid."):
                found |= _segments_of(os.path.join(folder, name))
    return found


def _segments_of(note: str) -> set[str]:
    with contextlib.suppress(OSError, ValueError):
        with open(note, encoding="ascii") as file:
            pid = int(file.read())
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            return {line.split()[5] for line in maps if _SEGMENT in line and "(deleted)" not in line}
    return set()


if __name__ == "__main__":
    main(*sys.argv[1:4])
