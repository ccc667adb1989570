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
WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
FAILED = ctypes.c_void_p(-1).value  # what mmap returns if it fails


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
    map_over(found.ctypes.data, nbytes, descriptor)
    if nbytes >= HUGE_PAGE:
        libc.madvise(found.ctypes.data, nbytes, MADV_COLLAPSE)  # the kernel uses as many huge pages as it can
    return found


def map_over(address: int, nbytes: int, descriptor: int) -> None:
    """Replace a mapping of this process by the file's first bytes, shared, with all pages present.

    Args:
        address: The mapping's first byte. No other memory lies in its pages.
        nbytes: The mapping's length.
        descriptor: The file, which is at least as long.

    Raises:
        OSError: The kernel refused.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | MAP_FIXED
    require(libc.mmap(address, nbytes, WRITABLE, flags, descriptor, 0))


def make_private(address: int, nbytes: int) -> None:
    """Replace a mapping of this process by private memory with the same values. No thread may use it meanwhile.

    (mremap would do it at one instant. But Intel MPI's libfabric replaces mremap by a function that loses the address.)

    Args:
        address: As for `map_over`.
        nbytes: As for `map_over`.

    Raises:
        OSError: The kernel refused.
    """
    values = ctypes.string_at(address, nbytes)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED
    require(libc.mmap(address, nbytes, WRITABLE, flags, -1, 0))
    ctypes.memmove(address, values, nbytes)


def require(result: int | None) -> None:
    """Raise OSError if this is what mmap returns when the kernel refuses."""
    if result == FAILED:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
