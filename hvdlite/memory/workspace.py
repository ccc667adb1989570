"""A workspace keeps what a lane's requests use again: scratch memory, the staging arena, and communicators.

The communicators are those of both levels (`two_levels`). A workspace also allocates arenas, and the flags of
`shared_flags`. Each workplace has a workspace. It makes each thing when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hvdlite.arrays import LINE, LONG, Array, is_host, module, on_boundary
from hvdlite.memory.arena import Arena, allocate
from hvdlite.memory.huge_pages import HUGE_PAGE
from hvdlite.system.weak_references import Crowd
from hvdlite.transports import Maximum, Transport, two_levels
from hvdlite.transports.shared_flags import FLAG_BYTES, MOST_RANKS, ORDERED
from hvdlite.transports.two_levels import Levels

STAGING_BYTES, NETWORK_STAGING_BYTES = 1 << 20, 8 << 20
"""The bytes of the staging arena on one host, which is used in two halves, and on several hosts."""


class Workspace:
    """Scratch memory, staging arena and levels of one lane, for arrays on the host or on one GPU.

    Each is made when it is first needed.
    """

    def __init__(self) -> None:
        self.buffer: Array | None = None
        self.buffers = Crowd()
        """The memory of all buffers in use. Reductions that were prepared with an earlier buffer keep that one."""
        self.stage: Arena | None = None
        self.staged: dict[Hashable, Callable[[Array], None]] = {}
        """By kind of piece, a function that reduces such pieces in the staging arena."""
        self.split: Levels | None = None

    def scratch(self, like: Array, length: int) -> Array:
        """A flat array of `length` elements, with like's dtype and device. Its contents are undefined."""
        nbytes = length * like.dtype.itemsize
        # Additions are faster if scratch and array begin at the same place in a cache line. Messages arrive faster in
        # huge pages, which NumPy asks for if an array has room for two (MEASURED.md, "Details").
        start = like.ctypes.data % LINE if nbytes >= LONG and is_host(like) else 0
        if self.buffer is None or self.buffer.size < start + nbytes:
            room, boundary = nbytes + LINE, HUGE_PAGE if nbytes >= HUGE_PAGE else LINE
            self.buffer = on_boundary(room, boundary) if is_host(like) else module(like).empty(room, np.uint8)
            owner = getattr(self.buffer, "base", None)  # parts of the buffer refer to it, not to the buffer
            self.buffers.append(self.buffer if owner is None else owner)
        part: Array = self.buffer[start : start + nbytes]
        return part.view(like.dtype)

    @property
    def scratch_bytes(self) -> int:
        """The bytes of all scratch memory, and of a staging arena that is not shared."""
        private = self.stage.own.nbytes if self.stage and self.stage.peers is None else 0
        return private + sum(int(each.nbytes) for each in self.buffers)

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
        """A new arena, shared within each host if possible. It replaces the arena of this name. Collective."""
        return allocate(transport, nbytes, share, self.levels(transport, hosts).local)

    def agree_in_memory(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Maximum | None:
        """A Maximum in memory that all ranks of `transport` share. Collective.

        Returns None if the ranks share no memory, or messages are faster.
        """
        if not ORDERED or not 1 < transport.size <= MOST_RANKS:
            return None
        flags = self.allocate("flags", transport, FLAG_BYTES, share=True, hosts=hosts)
        return transport.share(flags.peers) if flags.peers else None

    def levels(self, transport: Transport, hosts: Sequence[Sequence[int]]) -> Levels:
        """The ranks of this host, and the drivers of all hosts. Collective at the first call."""
        if self.split is None:
            self.split = two_levels.split(transport, hosts)
        return self.split

    def close(self) -> None:
        """Release the communicators and the memory. Arrays that other code still uses stay valid. Collective."""
        if self.split is not None:
            self.split.close()
        self.stage = self.buffer = None
        self.staged.clear()


def staging_bytes(hosts: Sequence[Sequence[int]]) -> int:
    """The bytes that pass through the staging arena at a time.

    On one host the arena fits the cache. Over a network it is long enough to hide the latency.
    """
    return STAGING_BYTES if len(hosts) < 2 else NETWORK_STAGING_BYTES
