"""Files by which a rank and hvdliterun inform each other. Each host has a folder for the job.

`FILES` lists the files that ranks write or read; `launcher/hvdlite_launcher/job_folder.py` has the whole table. Without
hvdliterun there is no folder, and no file is written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from hvdlite.system.launcher_environment import JOB_FOLDER as FOLDER
from hvdlite.system.launcher_environment import JOB_RANK as RANK
from hvdlite.system.launcher_environment import SEVERAL_HOSTS

FILES = {
    # name: (writer, reader, lifetime). Those of one rank end with its number: `present.3`.
    "task": ("agent", "rank", "the job: the pickled function of hvdlite.run"),
    "ending": ("agent", "keeper, rank", "from a signal to hvdliterun on: ranks save their work"),
    "told": ("agent", "rank", "from the job's first failure on: the number of that rank"),
    "failed": ("keeper, rank", "agent", "from the host's first failure on: rank, code, signal, time"),
    "absent": ("keeper, rank", "agent", "from the end of a rank on that nobody may wait for in hvd.init()"),
    "entered": ("rank", "keeper", "from the first hvd.init() on"),
    "entering": ("rank", "agent", "during hvd.init(): it waits for the others"),
    "present": ("rank", "agent, keeper", "from hvd.init() to hvd.shutdown(): the process id"),
    "stopped": ("rank", "keeper", "from the end of hvd.shutdown() on, if another rank has caused that"),
    "swallowed": ("rank", "agent", "the job: the error with which the script went on after another rank had left"),
    "summary": ("rank", "agent", "the job: the text of rank 0 that hvdliterun prints at the end"),
    "result": ("rank", "agent", "the job: what the function of hvdlite.run has returned, pickled"),
}
DECISION = 1.0  # seconds for hvdliterun to say which rank was the first to fail on several hosts
LEAVER_FIRST = 0.5  # seconds that a rank leaves to the one whose shutdown has stopped it, where no keeper waits


def path_of(folder: str, name: str, rank: str | None = None) -> str:
    """The path of one of FILES. Raises KeyError for another name."""
    assert FILES[name]
    return os.path.join(folder, name if rank is None else f"{name}.{rank}")


@contextlib.contextmanager
def entering() -> Iterator[None]:
    """Inside, this process waits for all ranks. hvdliterun ends the job if another rank has ended before."""
    note("entered")
    note("entering")
    try:
        yield
    finally:
        note("entering", there=False)


def note_presence(rank: int, present: bool) -> None:
    """The other ranks count on this rank from now on, or no longer."""
    note("present", str(rank), present, str(os.getpid()))


def stopped() -> None:
    """Another rank has shut down, and causes this process' failures from now on. hvdliterun reports that rank."""
    note("stopped")
    if not FOLDER:
        time.sleep(LEAVER_FIRST)


def note(word: str, rank: str | None = RANK, there: bool = True, text: str = "") -> None:
    """Create or remove a file.

    Args:
        word: The first part of its name.
        rank: The second part.
        there: Whether to create the file, or to remove it.
        text: Its contents.
    """
    if FOLDER and rank:
        path = path_of(FOLDER, word, rank)
        with contextlib.suppress(OSError):  # the folder is on another host
            if there:
                with open(path, "x", encoding="ascii") as file:
                    file.write(text)
            else:
                os.unlink(path)


def write(word: str, text: str, mode: str = "w") -> bool:
    """Write this rank's file of this name. Returns whether that was possible.

    Args:
        word: The first part of its name.
        text: Its contents.
        mode: "a" adds to what is there.
    """
    if not (FOLDER and RANK):
        return False
    with contextlib.suppress(OSError):
        with open(path_of(FOLDER, word, RANK), mode, encoding="utf-8", errors="replace") as file:
            file.write(text)
        return True
    return False


def add_to_summary(text: str) -> bool:
    """Add a summary to those of earlier jobs of this process. Returns whether hvdliterun will print it.

    hvdliterun reads the file of its rank 0 alone. `init(comm=...)` may make another process rank 0 of a job.
    """
    return RANK == "0" and write("summary", f"{text}\n", "a")


def job_is_ending() -> bool:
    """Whether hvdliterun ends the job by a signal."""
    return os.path.exists(path_of(FOLDER or os.devnull, "ending"))


def claim(rank: int, code: int) -> bool:
    """Whether this failure is the job's first, and is to be printed.

    On one host the rank that creates the file `failed` is the first; between hosts hvdliterun decides. Without
    hvdliterun each rank prints its failure.

    Args:
        rank: This rank.
        code: Its exit code.
    """
    if not FOLDER:
        return True
    try:
        with open(path_of(FOLDER, "failed"), "x", encoding="ascii") as file:
            file.write(f"{rank} {code} 0 {time.time()}\n")
    except FileExistsError:
        return False
    except OSError:
        pass  # a scheduler has started this process on a host without the folder
    return not SEVERAL_HOSTS or is_first(rank, FOLDER)


def is_first(rank: int, folder: str) -> bool:
    """Whether the first failure of this host is the first of all hosts.

    Waits for hvdliterun's answer for a second. Without an answer it is, since two reports are better than none.

    Args:
        rank: The rank that failed first on this host.
        folder: The job's folder.
    """
    answer = path_of(folder, "told")
    deadline = time.monotonic() + DECISION
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open(answer, encoding="ascii") as file:
            return file.read() == str(rank)
        time.sleep(0.01)
    return True
