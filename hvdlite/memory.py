"""Memory that the ranks of one host share, and scratch space.

An *arena* is one anonymous memory file (memfd) per rank, mapped by every rank of the host: gradients are views into
it, and a reduction reads and writes the peers' gradients where they lie. Our own mappings, not `MPI.Win`: they are
owned by the arrays that look into them, so they outlive `shutdown()` (a view on a freed window crashes the process)
and a replaced communicator, and leave no file behind however the process dies. Being anonymous they do not count
against a container's small /dev/shm. Peers open them through /proc/<pid>/fd; a token in the first bytes proves that
it is the right file (process numbers mean something else in another container).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite import levels
from hvdlite.arrays import LINE, LONG, Array, is_host, module, on_boundary
from hvdlite.levels import Levels
from hvdlite.pages import HUGE_PAGE, map_file, whole_pages
from hvdlite.transports import Maximum, Transport
from hvdlite.transports.flags import FLAG_BYTES, MOST_RANKS, ORDERED
from hvdlite.warned import say_once

HEADER = LINE  # bytes: the token, padded so that what follows is aligned
STAGING_BYTES, MOST_STAGED_BYTES = 2 << 20, 8 << 20  # on one host: at a time, and of an array that goes that way
NETWORK_STAGING_BYTES = 8 << 20


@dataclass(frozen=True)
class Arena:
    """Bytes of this rank (`own`), and of the host's ranks in order (`peers`; None where memory is not shared)."""

    own: Array
    peers: tuple[Array, ...] | None

    def view(self, offset: int, length: int, dtype: Any) -> Array:
        """A flat typed view of this rank's bytes from `offset`."""
        return typed(self.own, offset, length, dtype)

    def peer_views(self, offset: int, length: int, dtype: Any) -> list[Array] | None:
        """The same view of every rank of the host, in order; None where memory is not shared."""
        return None if self.peers is None else [typed(peer, offset, length, dtype) for peer in self.peers]


def typed(memory: Array, offset: int, length: int, dtype: Any) -> Array:
    kind = np.dtype(dtype)
    return memory[offset : offset + length * kind.itemsize].view(kind)


def allocate(transport: Transport, nbytes: int, share: bool, local: Transport) -> Arena:
    """An arena of nbytes zeros on every rank, shared when `share` and every rank managed to. Collective.

    share: agreed by all ranks. local: the ranks of this host, who share. Where any rank has no room or may not look
    into a peer's, all get private memory.
    """
    if not share or transport.size == 1:
        return Arena(np.zeros(nbytes, np.uint8), None)
    mine = SharedFile.create(nbytes)
    cards = local.allgather_object(mine.card if mine else None)
    found = [mine.memory if mine and rank == local.rank else attach(card) for rank, card in enumerate(cards)]
    agreed = transport.allgather_object(all(each is not None for each in found))
    if mine:
        os.close(mine.card.descriptor)  # after the second exchange: every peer has opened it
    if not all(agreed):
        if transport.rank == 0:
            without = [rank for rank, fine in enumerate(agreed) if not fine]
            say_once(f"ranks {without} cannot share memory with their peers (no room, another container, too many open "
                     "files, see `ulimit -n`): all travels as messages instead")
        return Arena(np.zeros(nbytes, np.uint8), None)
    peers = tuple(each[HEADER : HEADER + nbytes] for each in found if each is not None)
    return Arena(peers[local.rank], peers)


@dataclass(frozen=True)
class Card:
    """How a peer finds a shared file: the owner's process, its descriptor there, its length, and the proof."""

    process: int
    descriptor: int
    nbytes: int
    token: bytes


@dataclass(frozen=True)
class SharedFile:
    card: Card
    memory: Array

    @classmethod
    def create(cls, nbytes: int) -> SharedFile | None:
        """A new anonymous file with its memory claimed; None where there is no room (or no memfd)."""
        descriptor = -1
        try:
            descriptor, length = os.memfd_create("hvdlite"), whole_pages(HEADER + nbytes)
            os.posix_fallocate(descriptor, 0, length)  # claimed now: no bus error later
            found = map_file(descriptor, length)
        except (OSError, AttributeError):
            if descriptor >= 0:
                os.close(descriptor)
            return None
        token = secrets.token_bytes(16)
        found[:16] = np.frombuffer(token, np.uint8)
        return cls(Card(os.getpid(), descriptor, length, token), found)


def attach(card: Card | None) -> Array | None:
    """A peer's file, mapped; None where it cannot be opened or is not the one meant."""
    if card is None:
        return None
    try:
        descriptor = os.open(f"/proc/{card.process}/fd/{card.descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_size != card.nbytes:
            return None
        found = map_file(descriptor, card.nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
    return found if found[:16].tobytes() == card.token else None


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
            self.split = levels.split(transport, hosts)
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
