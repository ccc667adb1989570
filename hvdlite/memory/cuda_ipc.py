"""GPU memory that the ranks of one host share through CUDA IPC handles: the counterpart of `memory.arena`.

Each rank allocates its arena with one cudaMalloc, because a part of a memory pool has no separate handle. It sends the
handle to the other ranks of the host over any MPI. A token in the first bytes proves that a peer opened the right
memory. If CUDA refuses a handle on one rank (no peer access, other visible devices), all ranks keep private memory.
Memory must not be freed while a peer has it open: `Openings.close` closes it on all ranks first.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from hvdlite.arrays import LINE, Array, module
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import RELIEF, finish
from hvdlite.memory.arena import Arena
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport

HEADER = LINE  # bytes: the token, padded to keep the rest aligned
BLOCK = 2 << 20
"""Bytes. The driver puts shorter allocations together in blocks of this size. If Open MPI had opened such a block, CUDA
sometimes refused to open an arena in it ("resource already mapped"). CUDA never refused an arena that fills whole
blocks.
"""


@dataclass(frozen=True)
class Card:
    """What a peer needs to open an arena: its handle, its length in bytes, and the token."""

    handle: bytes
    nbytes: int
    token: bytes


@dataclass
class Openings:
    """Peers' memory that is open in this process.

    Attributes:
        xp: The array module (CuPy).
        addresses: The addresses at which it is mapped.
    """

    xp: ModuleType
    addresses: list[int] = field(default_factory=list)

    def open(self, card: Card, device: int) -> Array | None:
        """A peer's arena as bytes; None if it cannot be opened, or its token is wrong."""
        runtime = self.xp.cuda.runtime
        try:
            address = runtime.ipcOpenMemHandle(card.handle)
        except runtime.CUDARuntimeError:
            return None
        self.addresses.append(address)
        # The memory may be on another GPU. CuPy gets this GPU's number, because this GPU's kernels reach the memory.
        memory = self.xp.cuda.UnownedMemory(address, card.nbytes, self, device)
        found = self.xp.ndarray(card.nbytes, np.uint8, self.xp.cuda.MemoryPointer(memory, 0))
        return found if found[:16].get().tobytes() == card.token else None

    def close(self, local: Transport) -> None:
        """Close all. Waits until the ranks of `local`, which share the memory, have closed theirs."""
        addresses, self.addresses = self.addresses, []
        for address in addresses:
            self.xp.cuda.runtime.ipcCloseMemHandle(address)
        local.barrier()


def allocate(
    openings: Openings, device: int, transport: Transport, nbytes: int, share: bool, local: Transport
) -> Arena:
    """Allocate an arena of nbytes zeros on each rank's GPU. Collective.

    The arena is shared if `share` is true and every rank succeeds.

    Args:
        openings: Keeps track of the peers' memory.
        device: This rank's GPU.
        transport: All ranks of the lane.
        nbytes: The arena's size on each rank.
        share: Whether to share; equal on all ranks.
        local: The ranks of this host.

    Raises:
        HvdliteError: On every rank, if some rank's GPU has no room.
    """
    own = new(openings.xp, HEADER + nbytes)
    full = [rank for rank, found in enumerate(transport.allgather_object(own is not None)) if not found]
    if own is None or full:
        raise HvdliteError(
            f"ranks {full} have no room for {nbytes >> 20} MiB of gradients and buffers on their GPU: use a smaller "
            "model or batch, or fewer ranks per GPU"
        )
    if not share or transport.size == 1:
        return Arena(own[HEADER:], None)
    cards = local.allgather_object(card_of(own))
    found = [
        own if rank == local.rank else openings.open(card, device) if card else None for rank, card in enumerate(cards)
    ]
    agreed = transport.allgather_object(all(each is not None for each in found))
    if not all(agreed):
        openings.close(local)
        if transport.rank == 0:
            say_once(
                f"the GPUs of ranks {[rank for rank, fine in enumerate(agreed) if not fine]} cannot read other "
                "ranks' memory (CUDA IPC is refused), so gradients travel as messages, which is slower [HVD113]"
            )
        return Arena(own[HEADER:], None)
    peers = tuple(each[HEADER:] for each in found if each is not None)
    return Arena(peers[local.rank], peers)


def new(xp: ModuleType, nbytes: int) -> Array | None:
    """nbytes zeros in separate blocks; None if there is no room, even after caches have been emptied."""
    whole = -(-nbytes // BLOCK) * BLOCK
    try:
        memory = xp.cuda.Memory(whole)
    except xp.cuda.runtime.CUDARuntimeError:
        for give_back in (*RELIEF, xp.get_default_memory_pool().free_all_blocks):
            give_back()
        try:
            memory = xp.cuda.Memory(whole)
        except xp.cuda.runtime.CUDARuntimeError:
            return None
    array: Array = xp.ndarray(nbytes, np.uint8, xp.cuda.MemoryPointer(memory, 0))
    array[...] = 0
    finish(array)
    return array


def card_of(own: Array) -> Card | None:
    """Write the token, and return the card for peers; None if the memory has no handle."""
    runtime = module(own).cuda.runtime
    token = secrets.token_bytes(16)
    try:
        handle = runtime.ipcGetMemHandle(own.data.ptr)
    except runtime.CUDARuntimeError:
        return None
    own[:16].set(np.frombuffer(token, np.uint8))
    finish(own)
    return Card(handle, own.nbytes, token)
