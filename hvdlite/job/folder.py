"""Files by which a rank and hvdliterun inform each other. Each host has a folder for the job.

    entered.RANK    the rank has called hvd.init()
    entering.RANK   the rank waits in hvd.init() for other ranks
    absent.RANK     the rank will not call hvd.init() any more
    present.RANK    the other ranks count on this rank; contains its process number, since a shell may have started it
    stopped.RANK    another rank has shut down, and causes the failures of this rank
    swallowed.RANK  the error by which the rank learned that another rank has left, if the script has caught it
    failed          the host's first failure: rank, code, signal, time
    ending          hvdliterun ends the job by a signal; ranks have time to save their work
    told            written by hvdliterun on several hosts: the rank that failed first

Without hvdliterun there is no folder, and no file is written.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from hvdlite.system.launcher_environment import JOB_FOLDER as FOLDER
from hvdlite.system.launcher_environment import JOB_RANK as RANK
from hvdlite.system.launcher_environment import SEVERAL_HOSTS


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
        time.sleep(0.5)


def note(word: str, rank: str | None = RANK, there: bool = True, text: str = "") -> None:
    """Create or remove a file.

    Args:
        word: The first part of its name.
        rank: The second part.
        there: Whether to create the file, or to remove it.
        text: Its contents.
    """
    if FOLDER and rank:
        path = os.path.join(FOLDER, f"{word}.{rank}")
        with contextlib.suppress(OSError):  # the folder is on another host
            if there:
                with open(path, "x", encoding="ascii") as file:
                    file.write(text)
            else:
                os.unlink(path)


def write(word: str, text: str) -> bool:
    """Write this rank's file of this name. Returns whether that was possible."""
    if not (FOLDER and RANK):
        return False
    with contextlib.suppress(OSError):
        with open(os.path.join(FOLDER, f"{word}.{RANK}"), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        return True
    return False


def job_is_ending() -> bool:
    """Whether hvdliterun ends the job by a signal."""
    return os.path.exists(os.path.join(FOLDER or os.devnull, "ending"))


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
        with open(os.path.join(FOLDER, "failed"), "x", encoding="ascii") as file:
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
    answer = os.path.join(folder, "told")
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open(answer, encoding="ascii") as file:
            return file.read() == str(rank)
        time.sleep(0.01)
    return True
