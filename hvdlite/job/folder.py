"""What a rank and hvdliterun tell each other through files in the job's folder, on each host its own.

    entered.RANK    it has begun to meet the others, which `entering.RANK` says while it waits for them
    absent.RANK     it comes to no hvd.init() any more
    present.RANK    the others count on it; has the number of its process, which a shell may have started
    stopped.RANK    another rank has shut down: what this one fails with is that one's doing
    swallowed.RANK  the error by which it learned that another rank has left, if the script has caught that and gone on
    failed          the host's first failure: rank, code, signal, time
    ending          hvdliterun is ending the job by a signal, in which ranks have time to save their work
    told            hvdliterun's word on several hosts: the rank whose failure was the first of all

Without hvdliterun there is no folder, and nothing is told. The environment is read once: a script may
clear it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

FOLDER, RANK = os.environ.get("HVDLITE_JOB_DIR"), os.environ.get("HVDLITE_JOB_RANK")
SEVERAL_HOSTS = "HVDLITE_JOB_HOSTS" in os.environ


@contextlib.contextmanager
def entering() -> Iterator[None]:
    """Inside, this process waits for all others of its job: hvdliterun ends the job where one has ended before it came
    so far."""
    note("entered")
    note("entering")
    try:
        yield
    finally:
        note("entering", there=False)


def note_presence(rank: int, present: bool) -> None:
    """The others count on this rank from now on, or no more."""
    note("present", str(rank), present, str(os.getpid()))


def stopped() -> None:
    """What this process fails with from now on is not its doing, but that of a rank that has shut down, which is to be
    told of instead."""
    note("stopped")
    if not FOLDER:
        time.sleep(0.5)


def note(word: str, rank: str | None = RANK, there: bool = True, text: str = "") -> None:
    """Make the file of this name with this text, or remove it."""
    if FOLDER and rank:
        path = os.path.join(FOLDER, f"{word}.{rank}")
        with contextlib.suppress(OSError):  # the folder is on another host
            if there:
                with open(path, "x", encoding="ascii") as file:
                    file.write(text)
            else:
                os.unlink(path)


def write(word: str, text: str) -> bool:
    """Make the file of this name with this text; whether that was possible."""
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
    """Whether this failure is the job's first: the first to create the file in the job's folder wins, and of several
    hosts' firsts the one that hvdliterun names.

    Without such a folder (plain mpirun) every rank believes so, and tells its own.
    """
    if not FOLDER:
        return True
    try:
        with open(os.path.join(FOLDER, "failed"), "x", encoding="ascii") as file:
            file.write(f"{rank} {code} 0 {time.time()}\n")
    except FileExistsError:
        return False
    except OSError:
        pass  # there is no such folder on this host: a scheduler started us
    return not SEVERAL_HOSTS or is_first(rank, FOLDER)


def is_first(rank: int, folder: str) -> bool:
    """Whether this failure, the first of its host, is that of the whole job: hvdliterun decides between hosts.

    Waits for its word, a second at most, and then believes so: better told twice than never.
    """
    word = os.path.join(folder, "told")
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), open(word, encoding="ascii") as file:
            return file.read() == str(rank)
        time.sleep(0.01)
    return True
