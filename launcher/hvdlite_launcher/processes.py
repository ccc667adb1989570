"""Finds the processes of a job on this host, sends them signals, and kills them. Finds MPICH's shared memory.

Every process of a job has a mark: the job's id in its environment. Open MPI's daemons on other hosts have no mark, but
their arguments name the job's folder. Rejected: an agent as subreaper (prctl) of all processes. On other hosts the MPI
starts its daemons over connections of its own, and nobody would find the processes of an agent that was killed.

MPICH chooses the names of its segments (files in /dev/shm), and keeps them until the job ends. An agent removes a
segment only if a rank of the job has mapped it. Not removed are the few KB of /tmp/hydra_hwloc_xmlfile_*, which Hydra
leaves when it is killed or aborts: nothing shows whose they are.
"""

import contextlib
import math
import os
import re
import signal
import time
from collections.abc import Iterable, Iterator, Mapping

from hvdlite_launcher.job_folder import is_own, number_in, path_of, publish, ranks_with
from hvdlite_launcher.times import HELPERS_TIDY, KILLED_ARE_GONE, SEGMENTS_SETTLED

_SEGMENT = re.compile(r"/dev/shm/(?:mpich_shm_|mpich_shar_tmp|ucx_shm_posix_)[^/\s]+")
_BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_BATCHES = tuple(f"{name}=".encode() for name in _BATCH)
_MPIS_DAEMONS = (b"prted", b"orted")
_BATCH_DAEMONS = (b"slurmstepd", b"pbs_mom", b"sbatchd", b"res")  # the parents of a batch job's processes


def mark_of(job: str, *environs: Mapping[str, str]) -> bytes:
    """The mark of a job's processes: its id, and the ids of the batch jobs that these environments belong to.

    A batch job that a rank submits inherits the job's id, but goes on. Its id is another one, and a batch system's
    daemon has started it.
    """
    own = (f"{name}={environ[name]}" for environ in environs for name in _BATCH if name in environ)
    return os.fsencode("\0".join((f"HVDLITE_JOB_ID={job}", *own)))


def marked(mark: bytes) -> Iterator[int]:
    """The processes that have this mark, except this process."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid() and has_mark(int(entry), mark):
            yield int(entry)


def has_mark(pid: int, mark: bytes) -> bool:
    """Whether the process exists and has this mark."""
    job, *batch = mark.split(b"\0")
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        found = environ.read().split(b"\0")
        others = (each for each in found if each.startswith(_BATCHES) and each not in batch)
        return (job in found and not (any(others) and in_batch(pid))) or is_daemon(pid, job)
    return False


def is_daemon(pid: int, job: bytes) -> bool:
    """Whether the process is Open MPI's daemon for this job: its arguments name the job's folder. Raises OSError."""
    with open(f"/proc/{pid}/comm", "rb") as comm:
        if comm.read().rstrip(b"\n") not in _MPIS_DAEMONS or os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return False
    with open(f"/proc/{pid}/cmdline", "rb") as arguments:
        return job.partition(b"=")[2] in arguments.read()


def in_batch(pid: int) -> bool:
    """Whether the process descends from a batch system's daemon."""
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                name, _, rest = file.read().partition(b"(")[2].rpartition(b")")
        except OSError:
            return False
        if name in _BATCH_DAEMONS:
            return True
        pid = int(rest.split()[1])
    return False


def kill_all(mark: bytes) -> None:
    """Kill every process that has this mark, except helpers that tidy up, and wait until all are gone."""
    deadline = time.monotonic() + KILLED_ARE_GONE
    while time.monotonic() < deadline:
        found = [pid for pid in marked(mark) if not tidies(pid)]
        if not found:
            return
        for pid in found:
            kill(pid, mark)
        time.sleep(0.01)


def see_off(mark: bytes) -> None:
    """Wait until the helpers that tidy up have ended, then kill the rest."""
    deadline = time.monotonic() + HELPERS_TIDY
    while (found := list(marked(mark))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in found:
        kill(pid, mark)


def kill(pid: int, mark: bytes) -> None:
    """Kill the process if it has this mark. With pidfd (Linux 5.3) the signal cannot reach a new process that has got
    the same number meanwhile."""
    with contextlib.suppress(OSError):
        try:
            process = os.pidfd_open(pid)
        except (AttributeError, OSError):
            if has_mark(pid, mark):
                os.kill(pid, signal.SIGKILL)
            return
        try:
            if has_mark(pid, mark):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def send(processes: Iterable[int], number: int) -> None:
    """Send a signal to these processes, as far as they still exist."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)


def tidies(pid: int) -> bool:
    """Whether the process removes shared memory of processes that have ended, and then ends itself: the resource
    tracker of multiprocessing or joblib, or torch's shared memory manager."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        command = file.read()
        return b"resource_tracker" in command or b"torch_shm_manager" in command
    return False


def rank_processes(folder: str) -> list[int]:
    """The process ids of this host's ranks. Between hvd.init() and hvd.shutdown() it is the process that called them;
    otherwise it is the user's command, which may be a shell around that process."""
    if not is_own(folder):
        return []
    ranks = ranks_with(folder, "pid")
    return [pid for rank in ranks if (pid := _present(folder, rank) or number_in(path_of(folder, "pid", rank)))]


def _present(folder: str, rank: int) -> int:
    """The process that has called hvd.init() as this rank, or 0. In a container its number may be a stranger's here."""
    pid = number_in(path_of(folder, "present", rank))
    wanted = {f"HVDLITE_JOB_DIR={folder}", f"HVDLITE_JOB_RANK={rank}"}
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environ:
        if wanted <= set(map(os.fsdecode, environ.read().split(b"\0"))):
            return pid
    return 0


class Segments:
    """MPICH's segments that the ranks of the job with this folder have mapped.

    A look takes milliseconds for a process with thousands of mappings, and holds one of its locks. MPIs make no more
    segments after all ranks have met, so the looks end SEGMENTS_SETTLED after that. The paths are also in the folder:
    if the agent is killed, the MPI may kill the ranks before a successor can look.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.found = self._noted()
        self._over = math.inf

    def look(self, last: bool = False) -> None:
        """Note the segments that are mapped now. last: look even if the looks have ended."""
        if time.monotonic() > self._over and not last:
            return
        if more := segments_of_ranks(self.folder) - self.found:
            self.found |= more
            with contextlib.suppress(OSError):
                publish(self.folder, "segments", "\n".join(self.found).encode())
        if self._over == math.inf and self._all_present():
            self._over = time.monotonic() + SEGMENTS_SETTLED

    def remove(self) -> None:
        """Remove the segments that were noted."""
        for path in self.found:
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _noted(self) -> set[str]:
        with contextlib.suppress(OSError), open(path_of(self.folder, "segments"), encoding="utf-8") as file:
            return {path for path in file.read().split("\n") if is_own(self.folder) and _SEGMENT.fullmatch(path)}
        return set()

    def _all_present(self) -> bool:
        ranks = set(ranks_with(self.folder, "pid"))
        return bool(ranks) and ranks <= set(ranks_with(self.folder, "present"))


def segments_of_ranks(folder: str) -> set[str]:
    """MPICH's segments that ranks of the job with this folder map now."""
    return set().union(*map(_segments_of, rank_processes(folder)))


def _segments_of(pid: int) -> set[str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        found = {line.rstrip("\n").split(maxsplit=5)[-1] for line in maps}
        return {path for path in found if _SEGMENT.fullmatch(path)}
    return set()
