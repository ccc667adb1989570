"""A mapped file is shared, lies in huge pages if the kernel has them, and is unmapped with its last view."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from hvdlite.arrays import Array
from hvdlite.bench.contenders import ITEM, ordinary
from hvdlite.memory.huge_pages import HUGE_PAGE, MADV_COLLAPSE, libc, make_private, map_file, map_over, whole_pages

NBYTES = 2 * HUGE_PAGE


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = os.memfd_create("test-of-pages")
    os.posix_fallocate(descriptor, 0, NBYTES)
    yield descriptor
    os.close(descriptor)


def mapped(what: str) -> int:
    """The sum of one line of smaps over this process' mappings of the file, in bytes."""
    total, ours = 0, False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, *rest = line.split()
            if not first.endswith(":"):
                ours = "test-of-pages" in line
            elif ours and first == what + ":":
                total += int(rest[0]) * 1024
    return total


def test_the_last_part_of_a_long_file_is_a_whole_page() -> None:
    lengths = 64, HUGE_PAGE - 1, HUGE_PAGE, HUGE_PAGE + 65_535, HUGE_PAGE + 65_536, NBYTES
    assert [whole_pages(length) for length in lengths] == [*lengths[:4], NBYTES, NBYTES]


def test_mappings_are_of_the_same_memory_and_begin_at_a_huge_page(file: int) -> None:
    one, other = map_file(file, NBYTES), map_file(file, NBYTES)
    one[0], other[-1] = 1, 2
    assert other[0] == 1 and one[-1] == 2 and one.size == other.size == NBYTES
    assert [array.ctypes.data % HUGE_PAGE for array in (one, other)] == [0, 0]
    assert one.ctypes.data != other.ctypes.data and mapped("Rss") == 2 * NBYTES, "all pages are present"


def test_huge_pages_where_the_kernel_has_them(file: int) -> None:
    array = map_file(file, NBYTES)
    found = mapped("ShmemPmdMapped")
    can = libc.madvise(array.ctypes.data, NBYTES, MADV_COLLAPSE) == 0
    assert found == (NBYTES if can else 0)


def test_memory_is_given_back_with_the_last_view(file: int) -> None:
    def part() -> Array:
        return map_file(file, NBYTES)[HUGE_PAGE:].view("float32")[3:]

    view = part()
    view[:] = 1.0
    assert mapped("Size") == NBYTES
    del view
    assert mapped("Size") == 0


def test_a_mapping_becomes_the_files_and_private_again(file: int) -> None:
    """At the same address. Private memory keeps the values, and no longer follows the file."""
    array, other = (
        np.frombuffer(mmap.mmap(-1, NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8),
        map_file(file, 1),
    )
    address = array.ctypes.data
    map_over(address, NBYTES, file)
    other[0] = 7
    array[-1] = 8
    assert array[0] == 7 and os.pread(file, 1, NBYTES - 1) == b"\x08"
    make_private(address, NBYTES)
    other[0] = 9
    assert [array[0], array[-1]] == [7, 8] and mapped("Size") == 4096, "the other mapping's page"
    array[0] = 1
    assert other[0] == 9


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        map_file(1 << 20, 64)


def test_where_the_benchmark_has_its_arrays() -> None:
    """The benchmark has an array in ordinary pages, like torch's, and one with huge pages requested, like NumPy's."""

    def advice(array: Array) -> set[str]:
        with open("/proc/self/smaps") as lines:
            ours = False
            for line in lines:
                first, *rest = line.split()
                if first == "VmFlags:" and ours:
                    return set(rest)
                if not first.endswith(":"):
                    start, end = (int(number, 16) for number in first.split("-"))
                    ours = start <= array.ctypes.data < end
        raise AssertionError("no such mapping")

    usual, huge = ordinary(NBYTES - 3), ordinary(NBYTES - 3, huge_pages=True)
    assert "hg" not in advice(usual)
    assert ("hg" in advice(huge)) == os.path.exists("/sys/kernel/mm/transparent_hugepage")
    assert usual.size == huge.size == NBYTES // 4 - 1 and not np.any(usual) and usual.dtype == ITEM
