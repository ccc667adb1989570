"""The same arithmetic in whichever thread a lane's work runs.

A request runs in its caller's thread or in the lane's, and on other ranks perhaps in the other one. Each thread has its
own settings for floating-point numbers: TensorFlow's, and torch's after `set_flush_denormal`, take subnormal numbers
for zeros. Where every rank computes the same sum they would end with different bits, and so might the next run.
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
"""FE_DFL_ENV of glibc on MACHINES (it is another address on others): round to nearest, keep subnormal numbers."""
MACHINES = ("x86_64", "aarch64")
SMALLEST, ONE, BIT = 5e-324, 1.0, np.finfo(np.float64).eps.item()  # not known before they are multiplied and added


def quiet_runner() -> Callable[..., Any]:
    """A function that calls another with its arguments, in C's usual floating-point environment, and where infinities
    are no error to NumPy and no warning, whatever the user has set: they are his own, and GradScaler looks for them.
    Afterwards all is as it was. For one call at a time. It costs 0.2 us, in a thread with another environment 1 us;
    elsewhere than with glibc on MACHINES, 20 ns, and the environment stays the thread's."""
    quietly, library = numpys_runner(), libm()
    if library is None:
        return quietly
    # Rejected: to set it always. Behind a training step, whose caches are cold, that took 13 us.
    get, put, room = library.fegetenv, library.fesetenv, ctypes.create_string_buffer(ROOM)
    callers = ctypes.cast(room, ctypes.c_void_p)  # keeps the room alive

    def run(function: Callable[..., Any], *arguments: Any) -> Any:
        if SMALLEST * ONE > 0.0 and ONE + BIT / 2 == ONE == ONE - BIT / 4:  # subnormal numbers kept, round to nearest
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
    """glibc's, where USUAL is known. Its functions are over before it would pay to release the GIL."""
    if platform.machine() not in MACHINES:
        return None
    try:
        return ctypes.PyDLL("libm.so.6")
    except OSError:
        return None


def numpys_runner() -> Callable[..., Any]:
    """The part that is NumPy's. It costs 20 ns, an `errstate` 1 us and more."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # in which threads have settings, and contexts none

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            with np.errstate(all="ignore"):
                return function(*arguments)

        return run
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run
