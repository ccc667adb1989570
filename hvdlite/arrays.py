"""Arrays without knowing which: NumPy or CuPy, found from the array itself.

The core does its arithmetic through `module(array)` and orders it through `Queue`: on a device a queue is a stream
and marks are events; on the host, where everything has happened when a call returns, both do nothing. So one code
path serves both. Nothing here imports CuPy: an array that is not NumPy's brings its own module along.
"""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

Array: TypeAlias = Any  # np.ndarray or cupy.ndarray
bfloat16 = np.dtype(ml_dtypes.bfloat16)


def module(array: Array) -> ModuleType:
    """NumPy for a NumPy array, CuPy for a CuPy array."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def is_host(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def as_bytes(array: Array) -> Array:
    """The same memory as flat uint8. The array must be contiguous."""
    return array.reshape(-1).view(np.uint8)


@cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """'float32', 'bfloat16', ... Cached: NumPy computes it anew each time, in 5 us."""
    return str(dtype.name)


def is_small_float(dtype: np.dtype[Any]) -> bool:
    """float16 or bfloat16 (a floating type too, although NumPy files it under 'V')."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or is_small_float(dtype)


class Mark:
    """A point in a queue's work; `wait()` blocks the calling thread until the work before it is done."""

    def __init__(self, event: Any = None) -> None:
        self.event = event

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()


NOTHING_PENDING = Mark()


def mark(array: Array) -> Mark:
    """A mark behind all work issued so far on the array's current stream; nothing to wait for on the host."""
    if is_host(array):
        return NOTHING_PENDING
    event = module(array).cuda.Event(disable_timing=True)
    event.record()
    return Mark(event)


def finish(array: Array) -> None:
    """Wait for the calling thread's stream, so that MPI, which ignores streams, may touch the array."""
    if not is_host(array):
        module(array).cuda.get_current_stream().synchronize()
