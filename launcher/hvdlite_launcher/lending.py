"""Lends hvdliterun's stdin to rank 0: the descriptor itself, so that a terminal stays a terminal and no byte is lost.

hvdliterun opens a socket in the job's folder. Rank 0's keeper connects and receives the descriptor. For this mpirun
must start rank 0 on hvdliterun's own host. Otherwise the MPI or the scheduler forwards stdin.

Rejected: to let the MPI forward it. A terminal does not belong to the MPI's processes (Open MPI reports an end at
once), and input that comes faster than rank 0 reads it is lost (Open MPI: all after 64 KiB; MPICH: the job ends).
"""

import contextlib
import fcntl
import os
import socket
import stat
import termios
from collections.abc import Iterator
from contextlib import contextmanager

from hvdlite_launcher import UsageError
from hvdlite_launcher.command import Job, Settings
from hvdlite_launcher.job_folder import part_of, path_of
from hvdlite_launcher.streams import Streams


@contextmanager
def lending(job: Job, settings: Settings, streams: Streams, wanted: bool) -> Iterator[bool]:
    """Inside, rank 0's keeper receives hvdliterun's stdin from the socket `stdin` in the job's folder.

    wanted: whether it is hvdliterun's stdin, or one without input. Yields False if rank 0 may be on another host, where
    the MPI or scheduler forwards stdin. Raises UsageError if there is input that would be lost on the way.
    """
    moved = bool(settings.mpi_args or settings.binding_args)
    if settings.step or not settings.hosts[0].local or (settings.several and moved):
        if wanted and not (settings.step or settings.hosts[0].local) and _has_input():
            raise UsageError(
                f"rank 0 is on {settings.hosts[0].name}, and MPIs forward only a part of redirected input to another "
                "host: start hvdliterun on that host, or let the script open the file (or use < /dev/null)"
            )
        yield False
        return
    door = _door(part_of(job.folder))
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
    """At the end a terminal gets its settings back: rank 0 may have been killed in getpass(), which hides what is
    typed."""
    settings = termios.tcgetattr(stdin) if os.isatty(stdin) else None
    try:
        yield
    finally:
        if settings and not _in_background():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(stdin, termios.TCSADRAIN, settings)


def _door(folder: str) -> socket.socket:
    door = socket.socket(socket.AF_UNIX)
    directory = os.open(folder, os.O_RDONLY)
    try:
        door.bind(path_of(f"/proc/self/fd/{directory}", "stdin"))  # a socket's path is 108 bytes long at most
    except OSError as error:
        raise UsageError(f"{error.strerror}: {folder}: free some room there, or name a folder in TMPDIR", 1) from error
    finally:
        os.close(directory)
    door.listen(1)
    return door


def _has_input() -> bool:
    """Whether hvdliterun's stdin is a file or a pipe with input."""
    try:
        found = os.fstat(0)
        if stat.S_ISREG(found.st_mode):
            return os.lseek(0, 0, os.SEEK_CUR) < found.st_size
        return stat.S_ISFIFO(found.st_mode) and fcntl.ioctl(0, termios.FIONREAD, bytes(4)) != bytes(4)
    except OSError:
        return False


def _in_background() -> bool:
    """Whether hvdliterun's stdin is a terminal, but another job of the shell may read from it."""
    try:
        return os.isatty(0) and os.tcgetpgrp(0) != os.getpgrp()
    except OSError:  # not the terminal of this session
        return False
