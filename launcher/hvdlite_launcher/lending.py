"""hvdliterun's own stdin for rank 0: the descriptor itself, so that a terminal is one, and not a byte is lost.

Rejected: forwarding by the MPI, whose processes are not the terminal's (Open MPI gives an end at once), or lose what
comes faster than it is read (Open MPI all behind 64 KiB, MPICH the whole job).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite_launcher.command import Place, Settings
from hvdlite_launcher.place import room
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.usage import UsageError


@contextmanager
def lending(place: Place, settings: Settings, streams: Streams, wanted: bool) -> Iterator[bool]:
    """Rank 0's keeper finds our stdin at `FOLDER/stdin`, or one without input if ours is not `wanted`. Yields whether
    it does: not where rank 0 may be on another host, to which the MPI or scheduler forwards our stdin. Raises
    UsageError where there is input that would be lost on the way."""
    moved = bool(settings.mpi_args or settings.binding_args)
    if settings.step or not settings.hosts[0].local or (settings.several and moved):
        if wanted and not (settings.step or settings.hosts[0].local) and _has_input():
            raise UsageError(
                f"rank 0 is on {settings.hosts[0].name}, to which MPIs carry a part of redirected input only: start "
                "hvdliterun on that host, or let the script open the file (< /dev/null, if it wants no input)"
            )
        yield False
        return
    with room(place.folder):
        door = _door(place)
    stdin = os.dup(0) if wanted and not _in_background() else os.open(os.devnull, os.O_RDONLY)

    def serve() -> None:
        with contextlib.suppress(OSError):
            keeper, _ = door.accept()
            with keeper:
                socket.send_fds(keeper, [b"0"], [stdin])

    streams.add_door(door.fileno(), serve)
    try:
        with _as_before(stdin):
            yield True
    finally:
        streams.remove_door(door.fileno())
        door.close()
        os.close(stdin)


@contextmanager
def _as_before(stdin: int) -> Iterator[None]:
    """A terminal gets back the settings that it had, where rank 0 has been killed in getpass(), which lets nobody see
    what is typed."""
    settings = termios.tcgetattr(stdin) if os.isatty(stdin) else None
    try:
        yield
    finally:
        if settings and not _in_background():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(stdin, termios.TCSADRAIN, settings)


def _door(place: Place) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    folder = os.open(place.folder, os.O_RDONLY)
    try:
        door.bind(f"/proc/self/fd/{folder}/stdin")  # a socket's path is 108 bytes long at most
    finally:
        os.close(folder)
    door.listen(1)
    return door


def _has_input() -> bool:
    """Whether something waits in our stdin, a file or a pipe."""
    try:
        found = os.fstat(0)
        if stat.S_ISREG(found.st_mode):
            return os.lseek(0, 0, os.SEEK_CUR) < found.st_size
        return stat.S_ISFIFO(found.st_mode) and fcntl.ioctl(0, termios.FIONREAD, bytes(4)) != bytes(4)
    except OSError:
        return False


def _in_background() -> bool:
    """Whether our stdin is a terminal that belongs to another job of its shell, which we would read away."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not our terminal
        return False
