"""Reports new files in a folder as they appear, with the kernel's inotify.

Rejected: listing the folder every few milliseconds, because an agent runs as long as its job, and ranks need the cores.
"""

from __future__ import annotations

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
    added = libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_CLOSE_WRITE | _IN_CREATE)
    if descriptor < 0 or added < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
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
            raise OSError("more files at once than fs.inotify.max_queued_events")
        name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
        data = data[_EVENT.size + length :]
        yield os.fsdecode(name), bool(mask & _IN_CLOSE_WRITE)
