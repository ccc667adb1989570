"""Outlives hvdliterun, however that dies, and leaves nothing of the job.

Its stdin is a pipe whose other end hvdliterun holds, and whose first line tells it of the job: its folders
and its mark, with zeros between (an argv is seen by all users). When that closes, be it by a normal end or
SIGKILL, the janitor kills every process that carries the job's mark in its environment, and Open MPI's
daemons that were given the job's folder; and it removes the job's two folders and the segments that MPICH
made for it. There is no other code that cleans up: the way that must work after a crash is the way of every
job. Then it closes its stdout, and gives those a while that remove the shared memory of killed processes.

MPICH offers no choice of folder for its segment, and keeps the file for the life of the job. It is
ours to remove if a process of this job maps it: looked up while the job runs, never by name alone.
Not removed: the few KB of /tmp/hydra_hwloc_xmlfile_* that Hydra leaves when it is killed or told to
abort, since nothing says whose they are.
Runs as a script, in a session of its own, and imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import shutil
import signal
import stat
import time
from collections.abc import Iterable, Iterator, Mapping

_SEGMENT = re.compile(r"/dev/shm/(?:mpich_shm_|mpich_shar_tmp|ucx_shm_posix_)[^/\s]+")
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_BATCHES = tuple(f"{name}=".encode() for name in _BATCH)
_MPIS_DAEMONS = (b"prted", b"orted")  # which Open MPI starts on other hosts, without the job's variables
_DAEMONS = (b"slurmstepd", b"pbs_mom", b"sbatchd", b"res")  # of which one starts whatever a batch job consists of
_PART = "at-"  # and a host's name
_SETTLING = 10.0  # seconds after which ranks that have met make no more segments
_PATIENCE = 3.0  # seconds until killed processes must be gone
_TIDYING = 6.0  # seconds until those must be that tidy up behind them; torch's manager takes 2 to 3


def main(base: str, shared: str, mark: bytes, whole: bool) -> None:
    """Wait for the end of stdin, then clean up. base, shared: the job's folders. whole: whether to remove what other
    hosts have in them, too."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; our sign is the pipe
    segments = Segments(base)
    pause = 0.05
    while not select.select([0], [], [], pause)[0]:
        segments.folder = part_of(base)  # it may have been made only now
        segments.look()
        pause = min(pause * 1.2, 5.0)
    segments.look(last=True)
    kill_all(mark)
    for path in segments.found:
        with contextlib.suppress(OSError):
            os.unlink(path)
    for tree in filter(None, (shared, base)):
        leave(tree, whole)
    os.close(1)  # hvdliterun need not wait for the rest
    see_off(mark)


def order(base: str, shared: str | None, mark: bytes, whole: bool) -> bytes:
    """What to write to its stdin first."""
    return b"\0".join((b"whole" * whole, os.fsencode(base), os.fsencode(shared or ""), mark)) + b"\0\n"


def part_of(base: str) -> str:
    """This host's part of a job's folder: where several hosts have a job, they may share /tmp, and each has a part with
    its name; else the whole folder is its."""
    part = os.path.join(base, f"{_PART}{os.uname().nodename}")
    return part if os.path.isdir(part) else base


def claim(base: str) -> str:
    """Make this host's part of a job's folder, and that folder unless another host has made it; returns the part.

    Raises FileExistsError where there is one, or another user has made the folder.
    """
    try:
        os.makedirs(base, 0o700)
    except FileExistsError:
        if not is_own(base):
            raise
    part = os.path.join(base, f"{_PART}{os.uname().nodename}")
    os.mkdir(part, 0o700)
    return part


def leave(base: str, whole: bool) -> None:
    """Remove this host's part; and the job's folder, if no other host has a part in it any more, or if `whole`."""
    with contextlib.suppress(OSError):
        part = part_of(base)
        if not is_own(base):
            return
        if part != base:
            shutil.rmtree(part, ignore_errors=True)
        if whole or not any(name.startswith(_PART) for name in os.listdir(base)):
            shutil.rmtree(base, ignore_errors=True)


def mark_of(job: str, *environs: Mapping[str, str]) -> bytes:
    """By what a job's processes are known: its id in their environment. Those are another's that a batch daemon has
    started for another batch job than one of these environments tells of: one that a rank has submitted inherits the
    id, and goes on."""
    own = (f"{name}={environ[name]}" for environ in environs for name in _BATCH if name in environ)
    return os.fsencode("\0".join((f"HVDLITE_JOB_ID={job}", *own)))


def marked(mark: bytes) -> Iterator[int]:
    """The processes of this mark; not this one."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and has_mark(int(entry), mark):
            yield int(entry)


def has_mark(pid: int, mark: bytes) -> bool:
    """Whether the process is there, and of this mark."""
    job, *batch = mark.split(b"\0")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        found = environ.read().split(b"\0")
        others = (each for each in found if each.startswith(_BATCHES) and each not in batch)
        return (job in found and not (any(others) and in_batch(pid))) or is_daemon(pid, job)
    return False


def is_daemon(pid: int, job: bytes) -> bool:
    """Whether it is a daemon of the MPI's for this job, whose folder its arguments name. Raises OSError."""
    with open(f"/proc/{pid}/comm", "rb") as comm:
        if comm.read().rstrip(b"\n") not in _MPIS_DAEMONS or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
    with open(f"/proc/{pid}/cmdline", "rb") as arguments:
        return job.partition(b"=")[2] in arguments.read()


def in_batch(pid: int) -> bool:
    """Whether a batch system's daemon is among those that have started the process."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        except OSError:
            return False
        if name in _DAEMONS:
            return True
        pid = int(rest.split()[1])
    return False


def kill_all(mark: bytes) -> None:
    """Kill every process that has `mark`, but those that tidy up behind the others, and wait until they are gone."""
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        found = [pid for pid in marked(mark) if not tidies(pid)]
        if not found:
            return
        for pid in found:
            kill(pid, mark)
        time.sleep(0.01)


def see_off(mark: bytes) -> None:
    """Wait until those that tidy up have done so, or kill them."""
    deadline = time.monotonic() + _TIDYING
    while (found := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in found:
        kill(pid, mark)


def kill(pid: int, mark: bytes) -> None:
    """Kill a process of this mark: where the kernel has pidfd, never another one that has got its number since."""
    with contextlib.suppress(OSError):
        if not hasattr(os, "pidfd_open") or not hasattr(signal, "pidfd_send_signal"):
            os.kill(pid, signal.SIGKILL)
            return
        try:
            process = os.pidfd_open(pid)
        except OSError as error:
            if error.errno == errno.ENOSYS:  # a kernel before 5.3
                os.kill(pid, signal.SIGKILL)
            return
        try:
            if has_mark(pid, mark):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def send(processes: Iterable[int], number: int) -> None:
    """Send a signal to those of the processes that are still there."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def tidies(pid: int) -> bool:
    """Whether it removes shared memory behind processes that have gone, and then goes itself: the resource tracker of
    multiprocessing, or joblib's, torch's manager of shared files."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return b"resource_tracker" in command or b"torch_shm_manager" in command
    return False


def is_own(folder: str) -> bool:
    """Whether we have made it. Raises OSError."""
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def rank_processes(folder: str) -> list[int]:
    """The process ids of the ranks that have been started: once they have met, of those that have called hvd.init(),
    and else of the commands, which may be shells around them."""
    with contextlib.suppress(OSError):
        if is_own(folder):
            ranks = [name.removeprefix("pid.") for name in os.listdir(folder) if name.startswith("pid.")]
            return [pid for rank in ranks if (pid := _present(folder, rank) or _number_in(folder, f"pid.{rank}"))]
    return []


def _present(folder: str, rank: str) -> int:
    """The process that is this rank; 0: it has told of none. (In a container its number may be a stranger's here.)"""
    pid, wanted = _number_in(folder, f"present.{rank}"), {f"HVDLITE_JOB_DIR={folder}", f"HVDLITE_JOB_RANK={rank}"}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        if wanted <= set(map(os.fsdecode, environ.read().split(b"\0"))):
            return pid
    return 0


def _number_in(folder: str, name: str) -> int:
    """What a file of the job's folder says; 0: nothing, or not yet."""
    with contextlib.suppress(OSError, ValueError), open(os.path.join(folder, name), encoding="ascii") as file:
        return int(file.read())
    return 0


class Segments:
    """MPICH's segments that the ranks of the job with this folder have mapped.

    To look takes milliseconds of a process with thousands of mappings, and holds a lock of its; so it ends some seconds
    after all ranks here have met the others, when MPIs make no more.
    """

    def __init__(self, folder: str) -> None:
        self.found: set[str] = set()
        self.folder = folder
        self._over = math.inf

    def look(self, last: bool = False) -> None:
        """Note those that there are now. last: also after the time for it."""
        if time.monotonic() > self._over and not last:
            return
        self.found |= segments_of_ranks(self.folder)
        if self._over == math.inf and self._all_present():
            self._over = time.monotonic() + _SETTLING

    def _all_present(self) -> bool:
        names: set[str] = set()
        with contextlib.suppress(OSError):
            names.update(os.listdir(self.folder))
        ranks = [name.removeprefix("pid.") for name in names if name.startswith("pid.")]
        return bool(ranks) and all(f"present.{rank}" in names for rank in ranks)


def segments_of_ranks(folder: str) -> set[str]:
    """MPICH's segments that ranks of the job with this folder map now."""
    return set().union(*map(_segments_of, rank_processes(folder)))


def _segments_of(pid: int) -> set[str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
        return {path for path in found if _SEGMENT.fullmatch(path)}
    return set()


if __name__ == "__main__":
    told = b""
    while not told.endswith(b"\0\n") and (byte := os.read(0, 1)):
        told += byte
    if told.endswith(b"\0\n"):
        all_of_it, own, common, name = told[:-2].split(b"\0", 3)
        main(os.fsdecode(own), os.fsdecode(common), name, bool(all_of_it))
