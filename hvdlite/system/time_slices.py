"""Short time slices: a thread that has them runs soon after it wakes, even if all cores compute.

Linux lets a waking thread wait until the running one has used up its slice of 1.4 to 3 ms, unless the waking thread's
own slice is shorter. Since Linux 6.12 any process may ask for a short slice. On other systems nothing happens. Threads
inherit the slice from the thread that starts them. What this gains: MEASURED.md, "Between hosts".
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

SLICE = 100_000  # nanoseconds; the shortest there are
GET_AND_SET = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""The numbers of sched_getattr and sched_setattr. The C library has no functions for them."""
ORDINARY = 0  # SCHED_OTHER: in other classes a runtime means something else


class Attributes(ctypes.Structure):
    """The first version of the kernel's struct sched_attr."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def promptly(function: Callable[[], None]) -> None:
    """Ask for short slices for this thread, then call the function."""
    ask_for_short_slices()
    function()


def ask_for_short_slices() -> None:
    """Ask for short slices for this thread. Its priority and all else stay as they are."""
    mine = attributes()
    if mine is not None and mine.policy == ORDINARY:
        mine.runtime = SLICE
        ctypes.CDLL(None).syscall(GET_AND_SET[platform.machine()][1], 0, ctypes.byref(mine), 0)


def attributes() -> Attributes | None:
    """How the kernel schedules this thread; None if that is unknown."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or platform.machine() not in GET_AND_SET:
        return None
    mine, get = Attributes(), GET_AND_SET[platform.machine()][0]
    failed = ctypes.CDLL(None).syscall(get, 0, ctypes.byref(mine), ctypes.sizeof(mine), 0)
    return None if failed else mine
