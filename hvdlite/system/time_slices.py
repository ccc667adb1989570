"""Threads that run as soon as they wake, also where every core computes.

Linux has a thread that wakes wait until the one that computes has used up its time slice, 1.4 to 3 ms, unless its own
slice is shorter. Since 6.12 any process may ask for that. Measured between two hosts at 1 Gbit/s whose cores all
compute: backward of a small CNN, behind which half a megabyte is all-reduced, took 14.2 to 15.5 ms instead of 15.8 to
17.9, 11.5 without. Elsewhere than on such a Linux nothing happens. Threads that such a thread starts are like it.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

SLICE = 100_000  # nanoseconds; the shortest there are
GET_AND_SET = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""The numbers of sched_getattr and sched_setattr, for which C has no functions."""
ORDINARY = 0  # SCHED_OTHER: in other classes a runtime means something else


class Attributes(ctypes.Structure):
    """The kernel's struct sched_attr, as it first was."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip


def promptly(function: Callable[[], None]) -> None:
    """Call it in this thread, which has short slices from now on."""
    ask_for_short_slices()
    function()


def ask_for_short_slices() -> None:
    """For this thread, if the kernel grants it; its priority and all else stay."""
    mine = attributes()
    if mine is not None and mine.policy == ORDINARY:
        mine.runtime = SLICE
        ctypes.CDLL(None).syscall(GET_AND_SET[platform.machine()][1], 0, ctypes.byref(mine), 0)


def attributes() -> Attributes | None:
    """How this thread is scheduled; None where that is not known."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or platform.machine() not in GET_AND_SET:
        return None
    mine, get = Attributes(), GET_AND_SET[platform.machine()][0]
    failed = ctypes.CDLL(None).syscall(get, 0, ctypes.byref(mine), ctypes.sizeof(mine), 0)
    return None if failed else mine
