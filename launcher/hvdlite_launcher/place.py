"""The job's own folders and its janitor: made before anything else of the job, gone after everything.

The janitor starts first, before the folders exist, so that there is no moment at which a SIGKILL of
hvdliterun leaves something behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hvdlite_launcher.command import Place

_HERE = os.path.dirname(os.path.abspath(__file__))
_SHARED_MEMORY = "/dev/shm"
_PATIENCE = 5.0  # seconds for the janitor to end


@dataclass(frozen=True)
class Failure:
    """The job's first failure. signal: 0 unless the rank was killed by one."""

    rank: int
    code: int
    signal: int


@contextmanager
def a_place() -> Iterator[Place]:
    """A fresh `Place`; at the end all processes marked with its id are killed and its folders removed."""
    name = f"hvdlite-{secrets.token_hex(6)}"
    folder = os.path.join(tempfile.gettempdir(), name)
    shared = os.path.join(_SHARED_MEMORY, name) if os.access(_SHARED_MEMORY, os.W_OK) else None
    janitor = subprocess.Popen(
        [*_script("janitor"), name, folder, shared or ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )
    assert janitor.stdin is not None
    try:
        for path in filter(None, (folder, shared)):
            os.mkdir(path, 0o700)
        yield Place(name, folder, shared, _script("keeper"))
    finally:
        janitor.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            janitor.wait(_PATIENCE)


def first_failure(place: Place) -> Failure | None:
    """What the keepers or the ranks themselves have noted, if anything."""
    try:
        with open(os.path.join(place.folder, "failed"), encoding="ascii") as file:
            return Failure(*map(int, file.read().split()))
    except (OSError, ValueError, TypeError):
        return None


def rank_processes(place: Place) -> list[int]:
    """The process ids of the commands that have been started."""
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir(place.folder):
            if name.startswith("pid."):
                path = os.path.join(place.folder, name)
                with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
                    found.append(int(file.read()))
    return found


def _script(name: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", os.path.join(_HERE, f"{name}.py"))
