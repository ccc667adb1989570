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
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.arrays import LINE, Array
from hvdlite.memory.huge_pages import map_file, whole_pages
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport

HEADER = LINE  # bytes: the token, padded so that what follows is aligned


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


