"""The memory that a lane keeps between requests: scratch memory, the staging arena, and the two levels of hosts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hvdlite.arrays import LINE, LONG, Array, is_host, module, on_boundary
from hvdlite.memory.arena import Arena, allocate
from hvdlite.memory.huge_pages import HUGE_PAGE
from hvdlite.transports import Maximum, Transport, two_levels
from hvdlite.transports.shared_flags import FLAG_BYTES, MOST_RANKS, ORDERED
from hvdlite.transports.two_levels import Levels

STAGING_BYTES, MOST_STAGED_BYTES = 2 << 20, 8 << 20  # on one host: at a time, and of an array that goes that way

NETWORK_STAGING_BYTES = 8 << 20


class Workspace:
    """Scratch memory, staging arena and levels of one lane, for arrays on the host or on one GPU. Made when first
    needed.
    """

    def __init__(self) -> None:
        self.buffer: Array | None = None
        self.stage: Arena | None = None
        self.staged: dict[Hashable, Callable[[Array], None]] = {}
        """By kind of piece: the function that reduces a piece on the stage."""
        self.split: Levels | None = None

    def scratch(self, like: Array, length: int) -> Array:
        """A flat array of `length` elements, with like's dtype and device. Its contents are undefined."""
        nbytes = length * like.dtype.itemsize
        # Aligned to cache lines like the array it is added to: adding is faster then. NumPy asks for huge pages from
        # two of them on; messages arrive faster there (MEASURED.md, "Details").
        start = like.ctypes.data % LINE if nbytes >= LONG and is_host(like) else 0
        if self.buffer is None or self.buffer.size < start + nbytes:
            room, boundary = nbytes + LINE, HUGE_PAGE if nbytes >= HUGE_PAGE else LINE
            self.buffer = on_boundary(room, boundary) if is_host(like) else module(like).empty(room, np.uint8)
        part: Array = self.buffer[start : start + nbytes]
        return part.view(like.dtype)

    def new(self, like: Array, shape: Sequence[int]) -> Array:
        """A new array for the caller, with like's dtype and device. Its contents are undefined."""
        array: Array = module(like).empty(shape, like.dtype)
        return array

    def staging(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Arena:
        """The shared staging arena. Collective at the first call."""
        if self.stage is None:
            self.stage = self.allocate("staging", transport, self.staging_bytes(hosts), share=True, hosts=hosts)
        return self.stage

    def staging_bytes(self, hosts: Sequence[Sequence[int]]) -> int:
        """The staging arena's size."""
        return staging_bytes(hosts)

    def allocate(
        self, name: str, transport: Transport, nbytes: int, share: bool, hosts: Sequence[Sequence[int]]
    ) -> Arena:
        """An arena, shared within each host if possible. It replaces the arena of that name. Collective."""
        return allocate(transport, nbytes, share, self.levels(transport, hosts).local)

    def agree_in_memory(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Maximum | None:
        """A Maximum in memory that all ranks of `transport` share; None if they share none, or messages are faster.
        Collective.
        """
        if not ORDERED or not 1 < transport.size <= MOST_RANKS:
            return None
        flags = self.allocate("flags", transport, FLAG_BYTES, share=True, hosts=hosts)
        return transport.share(flags.peers) if flags.peers else None

    def levels(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Levels:
        """The ranks of this host, and the drivers across hosts. Collective at the first call."""
        if self.split is None:
            self.split = two_levels.split(transport, hosts)
        return self.split

    def close(self) -> None:
        """Release the communicators, and the memory that no one else holds. Collective."""
        if self.split is not None:
            self.split.close()
        self.stage = self.buffer = None
        self.staged.clear()


def staging_bytes(hosts: Sequence[Sequence[int]]) -> int:
    """How many bytes go through staging at a time.

    On one host a piece stays in the cache. Over a network it is long enough to hide the latency.
    """
    return STAGING_BYTES if len(hosts) < 2 else NETWORK_STAGING_BYTES
