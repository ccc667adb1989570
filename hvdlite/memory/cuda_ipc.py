"""GPU memory that the ranks of one host share: the counterpart of the arenas in `memory`, by CUDA IPC handles.

Each rank allocates its arena with one cudaMalloc of its own (memory from a pool has no handle of its own), and sends
the handle to the host's other ranks, over any MPI. A token in the first bytes proves that what was opened is what was
meant. Where any rank is refused (no peer access between two GPUs, a container with other visible devices), all keep
private memory. A peer's memory must not be freed while it is open here: `Openings.close` closes it everywhere first.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from hvdlite.arrays import Array, module
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import RELIEF, finish
from hvdlite.memory.arena import HEADER, Arena
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport

BLOCK = 2 << 20
"""Bytes. The driver puts shorter allocations together in blocks. Arenas of some hundred bytes, in blocks with memory
that Open MPI opens for messages, were refused at times (on an H200, "resource already mapped"), those in blocks of
their own never."""


@dataclass(frozen=True)
class Card:
    """How a peer opens an arena: its handle, its length in bytes, and the proof."""

    handle: bytes
    nbytes: int
    token: bytes


@dataclass
class Openings:
    """Peers' memory that is open in this process."""

    xp: ModuleType
    addresses: list[int] = field(default_factory=list)

    def open(self, card: Card, device: int) -> Array | None:
        """A peer's arena as bytes; None where it cannot be opened or is not the one meant."""
        runtime = self.xp.cuda.runtime
        try:
            address = runtime.ipcOpenMemHandle(card.handle)
        except runtime.CUDARuntimeError:
            return None
        self.addresses.append(address)
        # Memory on another GPU is given this one's number: its kernels reach it, and CuPy need not know better.
        memory = self.xp.cuda.UnownedMemory(address, card.nbytes, self, device)
        found = self.xp.ndarray(card.nbytes, np.uint8, self.xp.cuda.MemoryPointer(memory, 0))
        return found if found[:16].get().tobytes() == card.token else None

    def close(self, local: Transport) -> None:
        """Close all. local: the ranks who share, who wait here until all have."""
        addresses, self.addresses = self.addresses, []
        for address in addresses:
            self.xp.cuda.runtime.ipcCloseMemHandle(address)
        local.barrier()


def allocate(
    openings: Openings, device: int, transport: Transport, nbytes: int, share: bool, local: Transport
) -> Arena:
    """An arena of nbytes zeros on each rank's GPU, shared when `share` and every rank managed to. Collective.

    share: agreed by all ranks. local: the ranks of this host, who share. Raises HvdliteError on every rank where any
    has no room.
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
        own if rank == local.rank else card and openings.open(card, device) for rank, card in enumerate(cards)
    ]
    agreed = transport.allgather_object(all(each is not None for each in found))
    if not all(agreed):
        openings.close(local)
        if transport.rank == 0:
            say_once(f"the GPUs of ranks {[rank for rank, fine in enumerate(agreed) if not fine]} cannot look into "
                     "their peers' memory (CUDA IPC is refused): gradients travel as messages instead")
        return Arena(own[HEADER:], None)
    peers = tuple(each[HEADER:] for each in found if each is not None)
    return Arena(peers[local.rank], peers)


def new(xp: ModuleType, nbytes: int) -> Array | None:
    """nbytes zeros in blocks of their own; None where there is no room, even in what is kept for later."""
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
    array: Any = xp.ndarray(nbytes, np.uint8, xp.cuda.MemoryPointer(memory, 0))
    array[...] = 0
    finish(array)
    return array


def card_of(own: Array) -> Card | None:
    """How peers open this memory; None where it cannot be exported. Writes the token."""
    runtime = module(own).cuda.runtime
    token = secrets.token_bytes(16)
    try:
        handle = runtime.ipcGetMemHandle(own.data.ptr)
    except runtime.CUDARuntimeError:
        return None
    own[:16].set(np.frombuffer(token, np.uint8))
    finish(own)
    return Card(handle, own.nbytes, token)
