"""Reports new files in a folder as they appear, with the kernel's inotify.

Rejected: listing the folder every few milliseconds, because an agent runs as long as its job, and ranks need the cores.
`Polled` does it where other programs of the user have used up inotify (fs.inotify.max_user_instances).
"""

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

_IN_CLOSE_WRITE, _IN_CREATE, _IN_Q_OVERFLOW = 0x8, 0x100, 0x4000
_EVENT = struct.Struct("iIII")


def watch(folder: str) -> int:
    """A descriptor that is readable when `appeared` has names. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_CLOSE_WRITE | _IN_CREATE) < 0:
        number = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(number, os.strerror(number), folder)
    return descriptor


def appeared(descriptor: int) -> Iterator[tuple[str, bool]]:
    """Names of files that are new (False), or have been written and closed (True).

    Raises OSError if the kernel has dropped names: a keeper might wait for ever.
    """
    try:
        data = os.read(descriptor, 65536)
    except BlockingIOError:
        return
    while data:
        _, mask, _, length = _EVENT.unpack_from(data)
        if mask & _IN_Q_OVERFLOW:
            raise OSError("too many new files at once: raise fs.inotify.max_queued_events (sysctl)")
        name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
        data = data[_EVENT.size + length :]
        yield os.fsdecode(name), bool(mask & _IN_CLOSE_WRITE)


class Polled:
    """Finds the new files of a job's folder by listing it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._told: set[str] = set()

    def appeared(self) -> Iterator[tuple[str, bool]]:
        """As the function `appeared`, but of a file that has been written only the end is reported.

        A `pid.3` may have come and gone: then `ended.3` shows that it was there.
        """
        there: set[str] = set()
        with contextlib.suppress(OSError):  # somebody has removed the folder
            there |= set(os.listdir(self._folder))
        there |= {f"pid.{name[6:]}" for name in there if name.startswith("ended.")}
        for name in sorted(there - self._told, reverse=True):  # pid before ended
            kind, _, rank = name.partition(".")
            pipe = kind in ("out", "err")
            if pipe or f"ended.{rank}" in there or self._complete(kind, name):
                self._told.add(name)
                yield name, not pipe

    def _complete(self, kind: str, name: str) -> bool:
        """Whether the writer has finished the file. Keepers write a note at once; ranks end after a longer file."""
        with contextlib.suppress(OSError):  # a pid goes with its rank
            return kind in ("pid", "failed") and os.path.getsize(os.path.join(self._folder, name)) > 0
        return False
