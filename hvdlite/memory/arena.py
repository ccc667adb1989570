"""Arenas: memory that all ranks of a host read and write.

Each rank has one anonymous memory file (memfd) per arena, and every rank of the host maps it. Gradients are views of an
arena, so a reduction can work on the peers' gradients in place. If the process dies, no file remains, and a container's
small /dev/shm does not limit the size. Arrays own the mappings, which therefore outlive `shutdown()`. Rejected:
`MPI.Win`, since a view of a freed window would crash.

Peers open the file through /proc/<pid>/fd. A random token in the last bytes proves that it is the right file, since a
process of another container may have the same number.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from hvdlite.arrays import LINE, Array
from hvdlite.errors import HvdliteError
from hvdlite.memory.huge_pages import map_file, whole_pages
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport

TRAILER = LINE  # bytes after those of the arena. The token is at the end of the file.
TOKEN_BYTES = 16


@dataclass(frozen=True)
class Arena:
    """Shared bytes on a host or a GPU.

    Attributes:
        own: This rank's bytes.
        peers: The bytes of all ranks of the host, in rank order; None if memory is not shared.
    """

    own: Array
    peers: tuple[Array, ...] | None

    def view(self, offset: int, length: int, dtype: DTypeLike) -> Array:
        """This rank's bytes from `offset` as a flat array of `length` elements."""
        return typed(self.own, offset, length, dtype)

    def peer_views(self, offset: int, length: int, dtype: Any) -> list[Array] | None:
        """The same view for every rank of the host, in order; None if memory is not shared."""
        return None if self.peers is None else [typed(peer, offset, length, dtype) for peer in self.peers]


def typed(memory: Array, offset: int, length: int, dtype: DTypeLike) -> Array:
    """The bytes from `offset` as a flat array of `length` elements."""
    kind = np.dtype(dtype)
    part: Array = memory[offset : offset + length * kind.itemsize]
    return part.view(kind)


def allocate(transport: Transport, nbytes: int, share: bool, local: Transport) -> Arena:
    """Allocate an arena of nbytes zeros on every rank. Collective.

    The arena is shared if `share` is true and every rank succeeds. If one rank has no room, or cannot map a peer's
    file, all ranks get private memory.

    Args:
        transport: All ranks of the lane.
        nbytes: The arena's size on each rank.
        share: Whether to share; equal on all ranks.
        local: The ranks of this host.
    """
    if not share or transport.size == 1:
        return Arena(np.zeros(nbytes, np.uint8), None)
    mine = SharedFile.create(nbytes)
    files = exchange(transport, local, mine)
    if mine:
        os.close(mine.card.descriptor)  # every peer has opened it by now
    if files is None:
        return Arena(np.zeros(nbytes, np.uint8), None)
    peers = tuple(each[:nbytes] for each in files)
    return Arena(peers[local.rank], peers)


def one_per_host(transport: Transport, nbytes: int, local: Transport) -> np.ndarray:
    """Allocate nbytes zeros once per host, which all its ranks read and write. Collective.

    Args:
        transport: All ranks of the lane.
        nbytes: The bytes per host; equal on all ranks.
        local: The ranks of this host.

    Raises:
        HvdliteError: The ranks of a host cannot share memory; on all ranks.
    """
    if local.size == 1 and transport.size == 1:
        return np.zeros(nbytes, np.uint8)
    mine = SharedFile.create(nbytes if local.rank == 0 else 0)
    files = exchange(transport, local, mine)
    if mine:
        os.close(mine.card.descriptor)
    if files is None:
        raise HvdliteError("the ranks of a host cannot share memory for what lossy compression has not sent")
    return np.asarray(files[0][:nbytes])


def exchange(transport: Transport, local: Transport, mine: SharedFile | None) -> list[Array] | None:
    """Map the files of all ranks of this host. Collective; waits until all ranks have done so.

    Args:
        transport: All ranks of the lane.
        local: The ranks of this host.
        mine: This rank's file; None if it has none.

    Returns:
        The files' bytes in rank order. None, on all ranks, if one rank has no file or cannot map a peer's.
    """
    cards = local.allgather_object(mine.card if mine else None)
    found = [mine.memory if mine and rank == local.rank else attach(card) for rank, card in enumerate(cards)]
    agreed = transport.allgather_object(all(each is not None for each in found))
    if not all(agreed) and transport.rank == 0:
        without = [rank for rank, fine in enumerate(agreed) if not fine]
        say_once(
            f"ranks {without} cannot share memory with other ranks of their host, so all data travel as "
            "messages, which is slower. Causes: no free memory, ranks in different containers, or too many "
            "open files (`ulimit -n`) [HVD112]"
        )
    return [each for each in found if each is not None] if all(agreed) else None


@dataclass(frozen=True)
class Card:
    """What a peer needs to open a shared file: the owner's process, its descriptor there, the length, and the token."""

    process: int
    descriptor: int
    nbytes: int
    token: bytes


@dataclass(frozen=True)
class SharedFile:
    """A memory file of this rank: the card for its peers, and its bytes, with the token at the end."""

    card: Card
    memory: Array

    @classmethod
    def create(cls, nbytes: int) -> SharedFile | None:
        """Create an anonymous file of nbytes and more, and claim its memory.

        Returns None if there is no room, or the system has no memfd.
        """
        descriptor = -1
        try:
            descriptor, length = os.memfd_create("hvdlite"), whole_pages(nbytes + TRAILER)
            os.posix_fallocate(descriptor, 0, length)  # claim it now: a lack of memory later would be a bus error
            found = map_file(descriptor, length)
        except (OSError, AttributeError):
            if descriptor >= 0:
                os.close(descriptor)
            return None
        token = secrets.token_bytes(TOKEN_BYTES)
        found[-TOKEN_BYTES:] = np.frombuffer(token, np.uint8)
        return cls(Card(os.getpid(), descriptor, length, token), found)


def attach(card: Card | None) -> Array | None:
    """Map a peer's file; None if it cannot be opened or is another file."""
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
    return found if found[-TOKEN_BYTES:].tobytes() == card.token else None
