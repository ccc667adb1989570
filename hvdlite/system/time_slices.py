"""Short time slices: a thread with a short slice runs soon after it wakes, even if all cores compute.

A waking thread usually waits until the running one has used up its slice of 1.4 to 3 ms. If the waking thread's slice
is shorter, Linux lets it run at once. Since Linux 6.12 any process may ask for a short slice. On other systems this
module does nothing. Each lane's thread asks for a short slice when it starts. Threads inherit the slice from the thread
that starts them. For the gain see MEASURED.md, "Between hosts".
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable

SLICE = 100_000  # nanoseconds; Linux's minimum
GET_AND_SET = {"x86_64": (315, 314), "aarch64": (275, 274)}
"""The numbers of sched_getattr and sched_setattr. The C library has no functions for them."""
ORDINARY = 0  # SCHED_OTHER; in other classes `runtime` is not a time slice


class Attributes(ctypes.Structure):
    """The first version of the kernel's struct sched_attr."""

    _fields_ = (
        ("size", ctypes.c_uint32), ("policy", ctypes.c_uint32), ("flags", ctypes.c_uint64), ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32), ("runtime", ctypes.c_uint64), ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )  # fmt: skip

    def set_slice(self, nanoseconds: int) -> None:
        """Set the time slice, which is the runtime of an ORDINARY thread."""
        self.runtime = nanoseconds


def promptly(function: Callable[[], None]) -> None:
    """Ask for short slices for this thread, then call the function."""
    ask_for_short_slices()
    function()


def ask_for_short_slices() -> None:
    """Ask for short slices for this thread. Its other scheduling attributes do not change."""
    mine = attributes()
    if mine is not None and mine.policy == ORDINARY:
        mine.set_slice(SLICE)
        ctypes.CDLL(None).syscall(GET_AND_SET[platform.machine()][1], 0, ctypes.byref(mine), 0)


def attributes() -> Attributes | None:
    """The scheduling attributes of this thread; None if the system does not report them."""
    if sys.platform != "linux" or sys.maxsize < 1 << 32 or platform.machine() not in GET_AND_SET:
        return None
    mine, get = Attributes(), GET_AND_SET[platform.machine()][0]
    failed = ctypes.CDLL(None).syscall(get, 0, ctypes.byref(mine), ctypes.sizeof(mine), 0)
    return None if failed else mine
