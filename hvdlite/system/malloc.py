"""Freed tensors stay in the process, for the next step.

By default glibc returns what is free at the heap's end, and each large block, to the kernel, so that the next step's
tensors are faulted in again, page by page, and zeroed. Measured, torch on two cores: a step of a 10-million-parameter
MLP took up to 10,000 page faults (15 ms of 50), an 8-layer CNN 1,700, in 21.5 ms instead of 17.8; with these settings
none. What hvdlite adds to a step of that MLP takes half as long with them (8 ms instead of 16). The price: the heap
shrinks only once more than KEPT_BYTES are free at its end.
"""

from __future__ import annotations

import contextlib
import ctypes

from hvdlite.config import chose_allocator

KEPT_BYTES = 1 << 30
LARGE_BYTES = 32 << 20  # of a tensor that is given back: kept ones of this size leave gaps that no other fits
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed() -> None:
    """Set glibc's allocator so, unless the environment tells that the user has chosen one, or its settings."""
    if chose_allocator():
        return
    with contextlib.suppress(AttributeError, OSError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(MMAP_THRESHOLD, LARGE_BYTES):  # not on 32 bits, where both would be too much
            mallopt(TRIM_THRESHOLD, KEPT_BYTES)
