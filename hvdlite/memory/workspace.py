"""What a lane keeps to work with: scratch memory, the staging arena, the two levels of hosts."""

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
    """What a lane makes when it first needs it, and keeps: scratch memory, staging arena, the two levels. For arrays on
    the host, or for those on one GPU."""

    def __init__(self) -> None:
        self.buffer: Array | None = None
        self.stage: Arena | None = None
        self.staged: dict[Hashable, Callable[[Array], None]] = {}
        """By kind of piece: what reduces it on the stage."""
        self.split: Levels | None = None

    def scratch(self, like: Array, length: int) -> Array:
        """A flat array of `length` elements with like's dtype, on like's device; its contents are anything."""
        nbytes = length * like.dtype.itemsize
        # In cache lines as what it is added to: else that takes an eighth more. NumPy asks for huge pages for arrays of
        # two of them; 2 MiB arrive there in 0.9 of the time.
        start = like.ctypes.data % LINE if nbytes >= LONG and is_host(like) else 0
        if self.buffer is None or self.buffer.size < start + nbytes:
            room, boundary = nbytes + LINE, HUGE_PAGE if nbytes >= HUGE_PAGE else LINE
            self.buffer = on_boundary(room, boundary) if is_host(like) else module(like).empty(room, np.uint8)
        return self.buffer[start : start + nbytes].view(like.dtype)

    def new(self, like: Array, shape: Sequence[int]) -> Array:
        """An array for the caller, with like's dtype, on like's device; its contents are anything."""
        return module(like).empty(shape, like.dtype)

    def staging(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Arena:
        """A shared arena, made at the first call. Collective that once."""
        if self.stage is None:
            self.stage = self.allocate("staging", transport, self.staging_bytes(hosts), share=True, hosts=hosts)
        return self.stage

    def staging_bytes(self, hosts: Sequence[Sequence[int]]) -> int:
        return staging_bytes(hosts)

    def allocate(
        self, name: str, transport: Transport, nbytes: int, share: bool, hosts: Sequence[Sequence[int]]
    ) -> Arena:
        """An arena, shared within each host where that is possible; it replaces the one of that name. Collective."""
        return allocate(transport, nbytes, share, self.levels(transport, hosts).local)

    def agree_in_memory(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Maximum | None:
        """What agrees in memory that all ranks of `transport` share; None where they do not, or would be no quicker.
        Collective."""
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
        """Release the communicators, and what memory nobody else holds. Collective."""
        if self.split is not None:
            self.split.close()
        self.stage = self.buffer = None
        self.staged.clear()


def staging_bytes(hosts: Sequence[Sequence[int]]) -> int:
    """How much travels through staging at a time: on one host what stays in the cache, over a network what is long
    enough for its latency not to matter."""
    return STAGING_BYTES if len(hosts) < 2 else NETWORK_STAGING_BYTES
