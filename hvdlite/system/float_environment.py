"""One floating-point environment for all work of a lane, whichever thread runs it.

A request runs in its caller's thread or in the lane's thread, on each rank perhaps in another one. Each thread has its
own floating-point settings: TensorFlow, and torch after `set_flush_denormal`, replace subnormal numbers by zero. Then
two ranks that compute the same sum would get different bits.
"""

from __future__ import annotations

import contextvars
import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

ROOM = 256  # bytes; C's fenv_t takes 32 on x86-64, 8 on ARM
USUAL = ctypes.c_void_p(-1)
"""glibc's FE_DFL_ENV on MACHINES (elsewhere it is another address): round to nearest, keep subnormal numbers."""
MACHINES = ("x86_64", "aarch64")
SMALLEST, ONE, BIT = 5e-324, 1.0, np.finfo(np.float64).eps.item()  # Python must not fold products of these


def quiet_runner() -> Callable[..., Any]:
    """Return a function that calls another one in C's default floating-point environment and without NumPy's warnings.

    Infinities are neither errors nor warnings, whatever the user's NumPy settings: GradScaler looks for infinities. The
    caller's settings are restored after the call. Not for two calls at a time. On machines other than MACHINES, or
    without glibc, the thread's environment stays as it is. Costs: MEASURED.md, "Details".
    """
    quietly, library = numpys_runner(), libm()
    if library is None:
        return quietly
    # Rejected: to set it always, which costs about 13 us (MEASURED.md, "Details").
    get, put, room = library.fegetenv, library.fesetenv, ctypes.create_string_buffer(ROOM)
    callers = ctypes.cast(room, ctypes.c_void_p)  # keeps the room alive

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        if SMALLEST * ONE > 0.0 and ONE + BIT / 2 == ONE == ONE - BIT / 4:  # it is the default already
            return quietly(function, *arguments)
        get(callers)
        put(USUAL)
        try:
            return quietly(function, *arguments)
        finally:
            put(callers)

    return run


@cache
def libm() -> ctypes.PyDLL | None:
    """glibc's math library, if USUAL is known for this machine.

    PyDLL keeps the GIL: the functions end before releasing it would pay.
    """
    if platform.machine() not in MACHINES:
        return None
    try:
        return ctypes.PyDLL("libm.so.6")
    except OSError:
        return None


def numpys_runner() -> Callable[..., Any]:
    """The part of `quiet_runner` that silences NumPy. A context costs less than `errstate` (MEASURED.md, "Details")."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # settings belong to threads, not to contexts

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            with np.errstate(all="ignore"):
                return function(*arguments)

        return run
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run
