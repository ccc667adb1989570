"""Tells which files appear in a folder, as they do: inotify, through libc. Nothing is polled.

Looking into the folder every few milliseconds was rejected: an agent lives as long as its job, beside ranks that need
the cores.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator

_IN_CLOSE_WRITE, _IN_CREATE = 0x8, 0x100
_EVENT = struct.Struct("iIII")


def watch(folder: str) -> int:
    """A descriptor that is readable when `appeared` has something to tell. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = int(libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
    added = libc.inotify_add_watch(descriptor, os.fsencode(folder), _IN_CLOSE_WRITE | _IN_CREATE)
    if descriptor < 0 or added < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), folder)
    return descriptor


def appeared(descriptor: int) -> Iterator[tuple[str, bool]]:
    """Names of new files, and whether they have just been written and closed."""
    try:
        data = os.read(descriptor, 65536)
    except BlockingIOError:
        return
    while data:
        _, mask, _, length = _EVENT.unpack_from(data)
        name = data[_EVENT.size : _EVENT.size + length].rstrip(b"\0")
        data = data[_EVENT.size + length :]
        yield os.fsdecode(name), bool(mask & _IN_CLOSE_WRITE)
