"""Settings of glibc's malloc that keep freed memory in the process, for the next step's tensors.

`init()` sets them in jobs of several ranks, unless the user has chosen an allocator or its settings. By default glibc
returns large blocks, and free memory at the heap's end, to the kernel. In the next step the kernel must map and zero
each page again: up to 10,000 page faults per step (MEASURED.md, "Details"). The price is that the heap shrinks only if
more than KEPT_BYTES are free at its end. Blocks above 32 MiB still go back.
"""

from __future__ import annotations

import contextlib
import ctypes

from hvdlite.config import chose_allocator

KEPT_BYTES = 1 << 30
LARGE_BYTES = 32 << 20  # larger tensors go back to the kernel: if kept, they would leave gaps that fit no other tensor
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt(3)


def keep_freed() -> None:
    """Set glibc's thresholds, unless the user has chosen an allocator or its settings."""
    if chose_allocator():
        return
    with contextlib.suppress(AttributeError, OSError):  # the C library is not glibc
        mallopt = ctypes.CDLL(None).mallopt
        if mallopt(MMAP_THRESHOLD, LARGE_BYTES):  # fails on 32 bits
            mallopt(TRIM_THRESHOLD, KEPT_BYTES)
