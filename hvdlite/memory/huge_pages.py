"""This module maps an arena's file (`memory.arena`) with all pages present, in huge pages if the kernel has them.

    reserved   [ ...... | 2 MiB | 2 MiB | 2 MiB | ... ]     address space of a Python mmap
    the file            [ ----------------------- ]         mapped over it, aligned to huge pages

A core caches the addresses of pages. Huge pages need 512 times fewer addresses. That gains most in virtual machines,
which translate each address twice. Linux has huge pages for such files since 6.1. For the gain, and the cost when a
file is mapped, see MEASURED.md, "Details".
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from hvdlite.arrays import Array

HUGE_PAGE = 2 << 20  # bytes
MAP_FIXED, MADV_COLLAPSE = 0x10, 25  # Linux constants without a name in Python

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def whole_pages(nbytes: int) -> int:
    """The length of a file for this many bytes. The last part gets a huge page, unless it fills less than 1/32."""
    pages, rest = divmod(nbytes, HUGE_PAGE)
    return (pages + 1) * HUGE_PAGE if pages and rest >= HUGE_PAGE // 32 else nbytes


def reserved(nbytes: int) -> Array:
    """Private bytes, aligned to huge pages. They live as long as an array views them."""
    room = np.frombuffer(mmap.mmap(-1, nbytes + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    start = -room.ctypes.data % HUGE_PAGE
    return room[start : start + nbytes]


def map_file(descriptor: int, nbytes: int) -> Array:
    """Map the file's bytes, shared, with all pages present. They live as long as an array views them.

    The first access to an unmapped page costs more than the arithmetic on it, so all pages are mapped here. The caller
    may close the descriptor. (Before Python 3.12, `mmap.mmap` of a file keeps a second descriptor, and jobs of many
    ranks come near the limit of 1024.)

    Raises:
        OSError: The kernel refused.
    """
    found = reserved(nbytes)
    flags, address = mmap.MAP_SHARED | mmap.MAP_POPULATE | MAP_FIXED, found.ctypes.data
    if libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0) != address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if nbytes >= HUGE_PAGE:
        libc.madvise(address, nbytes, MADV_COLLAPSE)  # the kernel uses as many huge pages as it can
    return found
