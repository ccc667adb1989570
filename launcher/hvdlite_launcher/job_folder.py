"""The job's folder: its files, and how hosts that share a disk keep their files apart.

Ranks, keepers, agents and hvdliterun exchange small files in this folder, so none of them needs a network address. The
folder has the same name on all hosts. A job on several hosts has one part `at-HOSTNAME` of the folder for each host,
because hosts may share /tmp. `FILES` lists them; `hvdlite/job/folder.py` has a copy of the rows that concern ranks.
This module imports little, because every keeper imports it.
"""

import contextlib
import os
import stat
from collections.abc import Iterable

FILES = {
    # name: (writer, reader, lifetime). Those of one rank end with its number: `pid.3`.
    "watched": ("agent", "keeper", "the job: somebody reads in this folder"),
    "segments": ("agent", "agent", "the job: the paths of MPICH's segments, for the successor of an agent that dies"),
    "stdin": ("hvdliterun", "keeper", "while mpirun runs: a socket that hands out hvdliterun's own stdin"),
    "task": ("agent", "rank", "the job: the pickled function of hvdlite.run"),
    "ending": ("agent", "keeper, rank", "from a signal to hvdliterun on: ranks save their work"),
    "told": ("agent", "rank", "from the job's first failure on: the number of that rank"),
    "failed": ("keeper, rank", "agent", "from the host's first failure on: rank, code, signal, time"),
    "out": ("keeper", "agent", "the rank: a named pipe, its stdout"),
    "err": ("keeper", "agent", "the rank: a named pipe, its stderr"),
    "pid": ("keeper", "agent", "while the command runs: its process id"),
    "ended": ("keeper", "agent", "from the command's end on"),
    "absent": ("keeper, rank", "agent", "from the end of a rank on that nobody may wait for in hvd.init()"),
    "entered": ("rank", "keeper", "from the first hvd.init() on"),
    "entering": ("rank", "agent", "during hvd.init(): it waits for the others"),
    "present": ("rank", "agent, keeper", "from hvd.init() to hvd.shutdown(): the process id"),
    "stopped": ("rank", "keeper", "from the end of hvd.shutdown() on, if another rank has caused that"),
    "swallowed": ("rank", "agent", "the job: the error with which the script went on after another rank had left"),
    "result": ("rank", "agent", "the job: what the function of hvdlite.run has returned, pickled"),
    "summary": ("rank", "agent", "the job: the text of rank 0 that hvdliterun prints at the end"),
}
ROOM = 64 * 1024  # bytes that must fit into the folder before a job starts
_PART = "at-"


def path_of(folder: str, name: str, rank: int | str | None = None) -> str:
    """The path of one of FILES. Raises KeyError for another name."""
    assert FILES[name]
    return os.path.join(folder, name if rank is None else f"{name}.{rank}")


def ranks_with(folder: str, name: str) -> list[int]:
    """The ranks that have this file."""
    assert FILES[name]
    with contextlib.suppress(OSError):
        pairs = (each.partition(".") for each in os.listdir(folder))
        return [int(rank) for kind, _, rank in pairs if kind == name and rank.isdigit()]
    return []


def publish(folder: str, name: str, data: bytes) -> None:
    """Make a file that appears with all its contents. Raises OSError."""
    path = path_of(folder, name)
    with open(f"{path}.new", "wb") as file:
        file.write(data)
    os.rename(f"{path}.new", path)


def number_in(path: str) -> int:
    """The number that a file contains; 0 if there is none yet."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return int(file.read())
    return 0


def age_of(path: str, now: float) -> float:
    """For how many seconds the file has been there; 0 if it is not. now: seconds since the epoch."""
    with contextlib.suppress(OSError):
        return now - os.path.getmtime(path)
    return 0.0


def arrivals(folder: str, now: float, settled: float = 0.0) -> tuple[list[int], float]:
    """The ranks of this host that ended at least `settled` seconds ago without hvd.init(), and for how many seconds
    others have waited in hvd.init()."""
    absent = [rank for rank in ranks_with(folder, "absent") if age_of(path_of(folder, "absent", rank), now) >= settled]
    waiting = (age_of(path_of(folder, "entering", rank), now) for rank in ranks_with(folder, "entering"))
    return absent, max(waiting, default=0.0)


def is_own(folder: str) -> bool:
    """Whether it is a folder, no link, and belongs to this user."""
    with contextlib.suppress(OSError):
        found = os.lstat(folder)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return False


def _own_part(base: str) -> str:
    return os.path.join(base, f"{_PART}{os.uname().nodename}")


def part_of(base: str) -> str:
    """This host's part of a job's folder: the whole folder if there are no parts."""
    part = _own_part(base)
    return part if os.path.isdir(part) else base


def watched_part(base: str) -> str:
    """The folder of this host in which somebody reads, or /dev/null.

    Under a scheduler only the first host has one. On the others anybody may have made a folder of that name. Open MPI
    makes one if a user starts the command that `hvdliterun -v` shows.
    """
    for each in (_own_part(base), base):
        if is_own(base) and is_own(each) and os.path.exists(path_of(each, "watched")):
            return each
    return os.devnull


def claim(base: str, parts: bool = True) -> str:
    """Make the folder, unless another host has made it, and this host's part of it if it has `parts`. Returns the part.

    Raises FileExistsError if this host has a part, or the folder belongs to another user; OSError if it cannot be made.
    """
    try:
        os.makedirs(base, 0o700)
    except FileExistsError:
        if not parts or not is_own(base):
            raise
    if not is_own(base):  # an NFS server may make it the user nobody's
        raise PermissionError(0, "the new folder belongs to another user", base)
    part = _own_part(base) if parts else base
    if parts:
        os.mkdir(part, 0o700)
    return part


def leave(base: str, whole: bool) -> None:
    """Remove this host's part. Remove the whole folder if `whole`, or if no host has a part in it any more."""
    import shutil

    if is_own(base):
        if (part := part_of(base)) != base:
            shutil.rmtree(part, ignore_errors=True)
        with contextlib.suppress(OSError):
            if whole or not any(name.startswith(_PART) for name in os.listdir(base)):
                shutil.rmtree(base, ignore_errors=True)


def missing_parents(path: str) -> Iterable[str]:
    """The folders around it that do not exist yet, innermost first."""
    while not os.path.exists(path := os.path.dirname(path)):
        yield path
