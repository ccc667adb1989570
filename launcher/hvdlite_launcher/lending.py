"""hvdliterun's own stdin for rank 0: the descriptor itself, so that a terminal is one, and not a byte is lost.

Rejected: forwarding by the MPI, whose processes are not the terminal's (Open MPI gives an end at once), or lose what
comes faster than it is read (Open MPI all behind 64 KiB, MPICH the whole job).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite_launcher.command import Place, Settings

_NAME = "stdin"


class Lending:
    """Waits at `FOLDER/stdin` for rank 0's keeper, and gives it a descriptor. stdin: which; closed at the end."""

    def __init__(self, place: Place, stdin: int) -> None:
        self.stdin = stdin
        self.door = socket.socket(socket.AF_UNIX)
        folder = os.open(place.folder, os.O_RDONLY)
        try:
            self.door.bind(f"/proc/self/fd/{folder}/{_NAME}")  # a socket's path is 108 bytes long at most
        finally:
            os.close(folder)
        self.door.listen(1)

    def serve(self) -> None:
        """Give it to who has come."""
        with contextlib.suppress(OSError):
            keeper, _ = self.door.accept()
            with keeper:
                socket.send_fds(keeper, [b"0"], [self.stdin])

    def close(self) -> None:
        self.door.shutdown(socket.SHUT_RDWR)  # there may be another descriptor of it
        self.door.close()
        os.close(self.stdin)


@contextmanager
def lending(place: Place, settings: Settings, wanted: bool) -> Iterator[Lending | None]:
    """Lends our stdin, or one without input if it is not `wanted`. None where rank 0 may be on another host, to which
    the MPI or scheduler forwards it."""
    moved = bool(settings.mpi_args or settings.binding_args)
    if settings.step or not settings.hosts[0].local or (settings.several and moved):
        yield None
        return
    lent = Lending(place, os.dup(0) if wanted and not _in_background() else os.open(os.devnull, os.O_RDONLY))
    try:
        yield lent
    finally:
        lent.close()


def _in_background() -> bool:
    """Whether our stdin is a terminal that belongs to another job of its shell, which we would read away."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not our terminal
        return False
