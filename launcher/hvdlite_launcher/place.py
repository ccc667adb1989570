"""The job's own folders and its janitor: made before anything else of the job, gone after everything.

The janitor starts first, before the folders exist, so that there is no moment at which a SIGKILL of
hvdliterun leaves something behind. Where it has been killed itself, another does its work at the job's end.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite_launcher.command import Place
from hvdlite_launcher.failures import Failure, parse
from hvdlite_launcher.janitor import claim, is_own, mark_of, order
from hvdlite_launcher.keeper import WATCHED
from hvdlite_launcher.ranks import ROOM, publish
from hvdlite_launcher.usage import UsageError

_HERE = os.path.dirname(os.path.abspath(__file__))
_SHARED_MEMORY = "/dev/shm"
_PATIENCE = 5.0  # seconds for the janitor to have killed and removed all


@contextmanager
def a_place(several: bool = False) -> Iterator[Place]:
    """A fresh `Place`; at the end all processes marked with its id are killed and its folders removed.

    several: other hosts have it too, under the same names, which they may share: each has a part of its own in it.
    """
    name = f"hvdlite-{secrets.token_hex(6)}"
    try:
        folder = base = os.path.join(os.path.abspath(tempfile.gettempdir()), name)
    except FileNotFoundError as error:
        raise UsageError(f"{error.strerror}: free some room there, or name a folder in TMPDIR", 1) from error
    shared = os.path.join(_SHARED_MEMORY, name) if os.access(_SHARED_MEMORY, os.W_OK) else None
    told = order(base, shared, mark_of(name, os.environ), whole=True)
    janitor = _janitor(told)
    try:
        with room(base):
            os.mkdir(base, 0o700)
            folder = claim(base) if several else base
        if not is_own(folder):  # an NFS server may give it to nobody
            raise UsageError(f"{folder}, just made, belongs to another user: name another place in TMPDIR", 1)
        with room(folder):
            publish(folder, WATCHED, bytes(ROOM))
        if shared:
            try:
                os.mkdir(shared, 0o700)
                if several:
                    claim(shared)
            except OSError:  # no room
                shared = None
        yield Place(name, folder, shared, _script("keeper"), _script("bourne"), base)
    finally:
        _have_clean_up(janitor)
        if os.path.exists(base):  # it has been killed, or stopped
            _have_clean_up(_janitor(told))


def _janitor(told: bytes) -> subprocess.Popen[bytes]:
    """A janitor that knows what to clean up."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    janitor = subprocess.Popen(
        _script("janitor"), stdin=pipe, stdout=pipe, stderr=null, env={}, start_new_session=True
    )
    assert janitor.stdin
    janitor.stdin.write(told)  # not in its argv: who sees a name there could make the folder before us
    janitor.stdin.flush()
    return janitor


def _have_clean_up(janitor: subprocess.Popen[bytes]) -> None:
    """Let it go to work, and wait until it has done all that must be done before we end."""
    assert janitor.stdin and janitor.stdout
    janitor.stdin.close()
    done = select.poll()
    done.register(janitor.stdout, select.POLLHUP)
    done.poll(_PATIENCE * 1000)
    janitor.stdout.close()
    threading.Thread(target=janitor.wait, daemon=True).start()  # what else it does may take seconds


@contextmanager
def room(folder: str) -> Iterator[None]:
    """For writing into the job's folder. Raises UsageError where that cannot be done."""
    try:
        yield
    except OSError as error:
        cure = "free some room there, or name another place in TMPDIR"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            cure = "each rank here takes two: raise `ulimit -n`, or start fewer"
        raise UsageError(f"the job's folder {folder} cannot be written: {error.strerror}: {cure}", 1) from error


def first_failure(place: Place) -> Failure | None:
    """What the keepers or the ranks themselves have noted, if anything."""
    try:
        with open(os.path.join(place.folder, "failed"), encoding="ascii") as file:
            return parse(file.read())
    except (OSError, ValueError):
        return None


def left_by_ranks(place: Place, word: str) -> dict[int, bytes]:
    """What ranks of this host have left in files of this name, `WORD.RANK`."""
    found = {}
    for name in os.listdir(place.folder):
        kind, _, rank = name.partition(".")
        if kind == word and rank.isdigit():
            with open(os.path.join(place.folder, name), "rb") as file:
                found[int(rank)] = file.read()
    return found


def _script(name: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", os.path.join(_HERE, f"{name}.py"))
