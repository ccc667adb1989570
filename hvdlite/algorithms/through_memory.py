"""All-gather and reduce-scatter between the ranks of one host, through the staging arena.

    all-gather       each rank copies its piece in, and the others' pieces out
    reduce-scatter   each rank copies the others' parts in, and adds what the others have copied in for it

Price: each byte is copied in and out, with 2 barriers per piece of staging memory. A message is copied as often, but in
small parts with a hand-shake for each. Below LEAST_BYTES the barriers cost more than they save. Broadcast and
all-to-all gain nothing this way and use messages (MEASURED.md, "Details").
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms.choice import Place
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.shared import adder, in_blocks
from hvdlite.arrays import LINE, Array, as_bytes
from hvdlite.memory.arena import typed
from hvdlite.memory.workspace import MOST_STAGED_BYTES, Workspace
from hvdlite.transports import Transport

LEAST_BYTES, MOST_SCATTERED_BYTES = 32 * 1024, 4 << 20
"""Bytes. Longer reduce-scatters are slower than a ring where cores are far apart (MEASURED.md, "Details")."""


def memory_for(
    nbytes: int, transport: Transport, workspace: Workspace, place: Place, most_bytes: int = MOST_STAGED_BYTES
) -> Sequence[Array] | None:
    """Every rank's staging bytes in rank order, if an operation should use them; else None. Collective.

    Args:
        nbytes: The size of the largest array of any rank; equal on all ranks.
        transport: The ranks that take part.
        workspace: Keeps the staging arena.
        place: Where the ranks are.
        most_bytes: Do not use staging for larger arrays.
    """
    if not (place.in_memory and place.one_host) or not LEAST_BYTES <= nbytes <= most_bytes:
        return None
    return workspace.staging(transport, place.hosts).peers


def allgather(transport: Transport, memory: Sequence[Array], pieces: Sequence[Array]) -> None:
    """Each rank copies its piece in and the others' pieces out, as much at a time as fits. 2 barriers each time.

    pieces: as in `movement`.
    """
    rank, room = transport.rank, memory[0].size
    flat = [as_bytes(piece) for piece in pieces]
    for start in range(0, max(map(len, flat)), room):
        parts = [piece[start : start + room] for piece in flat]
        memory[rank][: parts[rank].size] = parts[rank]
        transport.barrier()
        for other, part in enumerate(parts):
            if other != rank:
                part[:] = memory[other][: part.size]
        transport.barrier()


def reduce_scatter(
    transport: Transport, memory: Sequence[Array], parts: Sequence[Array], result: Array, reduction: Reduction
) -> None:
    """Each rank copies the others' parts in, and adds its own part and those copied in for it, in rank order.

    As much at a time as fits, with 2 barriers each time. Rejected: to copy each part into the memory of the rank that
    adds it; that is slower where cores are far apart, and that rank may still be copying the last result out of there.

    Args:
        transport: The ranks of this host.
        memory: Every rank's staging bytes.
        parts: A flat array for each rank, equally long on all ranks, not changed.
        result: As long as this rank's part.
        reduction: The operation and its scaling.
    """
    rank, size = transport.rank, transport.size
    room = memory[0].size // size // LINE * LINE  # bytes for each rank's part
    step = room // result.itemsize
    add_up = adder([result], reduction)
    for start in range(0, max(map(len, parts)), step):
        pieces = [part[start : start + step] for part in parts]
        for other, piece in enumerate(pieces):
            if other != rank:
                typed(memory[rank], other * room, piece.size, piece.dtype)[:] = piece
        transport.barrier()
        mine, target = pieces[rank], result[start : start + step]
        addends = [
            mine if other == rank else typed(theirs, rank * room, mine.size, mine.dtype)
            for other, theirs in enumerate(memory)
        ]
        for *block, total in in_blocks([*addends, target], reduction):
            add_up(block, [total])
        transport.barrier()
