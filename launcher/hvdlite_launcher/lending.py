"""hvdliterun's own stdin for rank 0: the descriptor itself, so that a terminal is one, and not a byte is lost.

Rejected: forwarding by the MPI, whose processes are not the terminal's (Open MPI gives an end at once), or lose what
comes faster than it is read (Open MPI all behind 64 KiB, MPICH the whole job).
"""

from __future__ import annotations

import contextlib
import os
import socket
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite_launcher.command import Place, Settings
from hvdlite_launcher.place import room
from hvdlite_launcher.streams import Streams


@contextmanager
def lending(place: Place, settings: Settings, streams: Streams, wanted: bool) -> Iterator[bool]:
    """Rank 0's keeper finds our stdin at `FOLDER/stdin`, or one without input if ours is not `wanted`. Yields whether
    it does: not where rank 0 may be on another host, to which the MPI or scheduler forwards our stdin."""
    moved = bool(settings.mpi_args or settings.binding_args)
    if settings.step or not settings.hosts[0].local or (settings.several and moved):
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


def _in_background() -> bool:
    """Whether our stdin is a terminal that belongs to another job of its shell, which we would read away."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not our terminal
        return False
