"""All-gather and reduce-scatter between the ranks of one host, through the staging arena.

    all-gather       each rank copies its piece in, and the others' pieces out
    reduce-scatter   each rank copies the others' parts in, and adds what the others have copied in for it

Price: each byte is copied in and out, with 2 barriers for each fill of the staging memory. Messages are copied as
often, but in small parts with a handshake for each. Below LEAST_BYTES the barriers cost more than the handshakes.
Broadcast and all-to-all would gain nothing here, and use messages (MEASURED.md, "Details").
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
"""The shortest arrays for which this is used, and the longest for reduce-scatter. Longer reduce-scatters are slower
than a ring if cores are far apart (MEASURED.md, "Details").
"""


def memory_for(
    nbytes: int, transport: Transport, workspace: Workspace, place: Place, most_bytes: int = MOST_STAGED_BYTES
) -> Sequence[Array] | None:
    """Every rank's staging memory in rank order, if an operation should use it; else None. Collective.

    Args:
        nbytes: The size of the largest array on any rank; equal on all ranks.
        transport: The ranks that take part.
        workspace: Keeps the staging arena.
        place: The facts about these ranks.
        most_bytes: The largest size for which the memory is used.
    """
    if not (place.in_memory and place.one_host) or not LEAST_BYTES <= nbytes <= most_bytes:
        return None
    return workspace.staging(transport, place.hosts).peers


def allgather(transport: Transport, memory: Sequence[Array], pieces: Sequence[Array]) -> None:
    """Gather pieces: each rank copies its piece in, and the others' pieces out. 2 barriers for each fill of the memory.

    pieces: as for `movement.allgather`.
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
    """Copy the other ranks' parts in, and add up this rank's part in rank order. 2 barriers for each fill of the
    memory.

    Rejected: to copy each part into the memory of the rank that adds it. That is slower if cores are far apart, and
    that rank may still copy the previous result from its memory.

    Args:
        transport: The ranks of this host.
        memory: Every rank's staging memory.
        parts: A flat array for each rank, equally long on all ranks; not changed.
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
