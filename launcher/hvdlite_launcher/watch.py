"""Reports new files in a folder as they appear, with the kernel's inotify.

Rejected: listing the folder every few milliseconds, because an agent runs as long as its job, and ranks need the cores.
"""

import ctypes
import errno
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
        if number in (errno.EMFILE, errno.ENOSPC):
            names = "fs.inotify.max_user_instances or fs.inotify.max_user_watches"
            raise OSError(f"cannot watch {folder}: {os.strerror(number)}: raise {names} (sysctl)")
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
