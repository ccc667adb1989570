"""The environment of a lane's arithmetic: C's default floating-point settings, and no warnings from NumPy.

`quiet_runner` makes the function with which a lane runs all work. That function sets C's default floating-point
environment, and turns NumPy's floating-point warnings and errors off.

A request runs in its caller's thread or in the lane's thread, and ranks may differ in that. Each thread has separate
floating-point settings: threads of TensorFlow, and of torch after `set_flush_denormal`, replace subnormal numbers by
zero. Without this module, two ranks that compute the same sum could get different bits.
"""

from __future__ import annotations

import contextvars
import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Protocol, TypeVar

import numpy as np

A = TypeVar("A")
R = TypeVar("R")
ROOM = 256  # bytes; C's fenv_t takes 32 on x86-64, 8 on ARM
USUAL = ctypes.c_void_p(-1)
"""glibc's FE_DFL_ENV on MACHINES: round to nearest, keep subnormal numbers. Other machines have other addresses."""
MACHINES = ("x86_64", "aarch64")
SMALLEST, ONE, BIT = 5e-324, 1.0, np.finfo(np.float64).eps.item()  # variables: Python would fold constants' products


class Runner(Protocol):
    """Calls a function with its argument, and returns the function's result."""

    def __call__(self, function: Callable[[A], R], argument: A, /) -> R: ...


def quiet_runner() -> Runner:
    """A function that calls another one in C's default floating-point environment and without NumPy's warnings.

    Infinities cause neither errors nor warnings, whatever the user's NumPy settings are, because GradScaler tests for
    infinities. The caller's settings are restored after the call. Two calls must not overlap. Without glibc, and on
    machines other than MACHINES, the thread's environment does not change. For the costs see MEASURED.md, "Details".
    """
    quietly, library = numpys_runner(), libm()
    if library is None:
        return quietly
    # Rejected: to set the environment at each call, which takes about 13 us (MEASURED.md, "Details").
    get, put, room = library.fegetenv, library.fesetenv, ctypes.create_string_buffer(ROOM)
    callers = ctypes.cast(room, ctypes.c_void_p)  # keeps `room` alive

    def run(function: Callable[[A], R], argument: A) -> R:
        if SMALLEST * ONE > 0.0 and ONE + BIT / 2 == ONE == ONE - BIT / 4:  # the environment is the default
            return quietly(function, argument)
        get(callers)
        put(USUAL)
        try:
            return quietly(function, argument)
        finally:
            put(callers)

    return run


@cache
def libm() -> ctypes.PyDLL | None:
    """glibc's math library, if USUAL is known for this machine.

    PyDLL keeps the GIL during calls, which are too short to release it.
    """
    if platform.machine() not in MACHINES:
        return None
    try:
        return ctypes.PyDLL("libm.so.6")
    except OSError:
        return None


def numpys_runner() -> Runner:
    """The part of `quiet_runner` that silences NumPy. A context is faster than `errstate` (MEASURED.md, "Details")."""
    if np.lib.NumpyVersion(np.__version__) < "2.0.0":  # settings belong to threads, not to contexts

        def run(function: Callable[[A], R], argument: A) -> R:
            with np.errstate(all="ignore"):
                return function(argument)

        return run
    context = contextvars.Context()
    context.run(np.seterr, all="ignore")
    return context.run
