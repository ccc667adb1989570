"""Files of shared memory: a peer opens only the right file, and no descriptor stays open."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from hvdlite.arrays import LINE, LONG, on_boundary
from hvdlite.memory.arena import Arena, SharedFile, attach
from hvdlite.memory.huge_pages import HUGE_PAGE
from hvdlite.memory.workspace import Workspace
from hvdlite.transports.threads import ThreadTransport, run_ranks


@contextmanager
def no_descriptor_more() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert os.listdir("/proc/self/fd") == before


def test_only_the_file_that_is_meant_is_mapped() -> None:
    """Another container has other process numbers, and descriptors are used again."""
    file = SharedFile.create(64)
    assert file
    with no_descriptor_more():
        found = attach(file.card)
        assert found is not None
        found[-1] = 7
        assert file.memory[-1] == 7
        others = (
            replace(file.card, token=bytes(16)),
            replace(file.card, nbytes=65),
            replace(file.card, descriptor=1 << 20),
        )
        assert [attach(other) for other in others] == [None] * 3
    os.close(file.card.descriptor)
    assert attach(None) is None


def test_without_room_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with no_descriptor_more():
        assert SharedFile.create(64) is None


def test_hosts_share_memory_all_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no room.

    If only its host went without, that host would send messages that no other host receives.
    """
    hosts, create = ((0, 1), (2, 3)), SharedFile.create
    poor = iter([True])
    monkeypatch.setattr(SharedFile, "create", lambda nbytes: None if next(poor, False) else create(nbytes))

    def main(transport: ThreadTransport) -> bool:
        return Workspace().allocate("a", transport, 64, True, hosts).peers is None

    assert run_ranks(4, main) == [True] * 4


@pytest.mark.parametrize("nbytes", [64, LONG, HUGE_PAGE, 3 * HUGE_PAGE])
def test_long_scratch_lies_in_cache_lines_as_what_it_is_for(nbytes: int) -> None:
    """Scratch memory is aligned like its array, wherever that begins. Long enough scratch memory is used again."""
    workspace, bytes_ = Workspace(), on_boundary(nbytes + 2 * LINE)
    workspace.scratch(bytes_, nbytes)
    kept = workspace.buffer
    for start in (60, 0, 4, 16):
        array = bytes_[start : start + nbytes].view(np.float32)
        scratch = workspace.scratch(array, array.size)
        assert scratch.shape == array.shape and scratch.dtype == array.dtype and workspace.buffer is kept
        assert nbytes < LONG or (scratch.ctypes.data - array.ctypes.data) % LINE == 0
        scratch[:] = 1


def test_scratch_memory_is_counted_while_it_is_in_use() -> None:
    """A longer request replaces the buffer. The shorter one counts as long as a prepared reduction has a part of it."""
    workspace, like = Workspace(), np.empty(0, np.float32)
    kept = workspace.scratch(like, 1000)
    first = workspace.scratch_bytes
    assert 4000 <= first < 4000 + 4 * LINE
    workspace.scratch(like, 500)
    assert workspace.scratch_bytes == first
    workspace.scratch(like, 5000)
    assert first + 20_000 <= workspace.scratch_bytes < first + 20_000 + 4 * LINE
    del kept
    assert 20_000 <= workspace.scratch_bytes < 20_000 + 4 * LINE
    workspace.stage = Arena(np.zeros(64, np.uint8), None)
    assert workspace.scratch_bytes >= 20_064
    workspace.close()
    assert workspace.scratch_bytes == 0
