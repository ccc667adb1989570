"""All-gather and reduce-scatter between the ranks of one host through memory that they share.

A message is copied in and out, too, but in small parts with a hand-shake for each. Measured on 2 ranks, 1 MiB from
each, with the agreement before it: an all-gather 153 us by messages, 111 through memory, 105 for MPI_Allgather without
agreement; a reduce-scatter 150, 90 and 100. Broadcast and all-to-all gained nothing (107 us instead of 103; 103 instead
of 80) and go by messages. Below LEAST_BYTES the barriers cost more than they save.
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
"""A reduce-scatter of 8 MiB takes 0.4 of a ring's time where cores share a cache, but 1.1 to 1.4 where they are far
apart."""


def memory_for(
    nbytes: int, transport: Transport, workspace: Workspace, place: Place, most_bytes: int = MOST_STAGED_BYTES
) -> Sequence[Array] | None:
    """Every rank's staging bytes in rank order, where these calls are to use them: None where not. Collective.

    nbytes: of the largest array of any rank; agreed on by all. most_bytes: for larger ones they are not to be used.
    """
    if not (place.in_memory and place.one_host) or not LEAST_BYTES <= nbytes <= most_bytes:
        return None
    return workspace.staging(transport, place.hosts).peers


def allgather(transport: Transport, memory: Sequence[Array], pieces: Sequence[Array]) -> None:
    """Each rank copies its piece in, and the others' out, as much at a time as there is room for. 2 barriers each time.
    pieces: as in `movement`."""
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
    """Each rank copies the others' parts of its array in, and adds its own part and what the others have copied in for
    it, in rank order; as much at a time as there is room for. 2 barriers each time. (To copy each part into the memory
    of the rank that adds it takes as long where cores share a cache, and 1.3 times as long where they are far apart.
    That rank may still be copying the last operation's result out of there.)

    parts: for each rank a flat array, as long on every rank, left as it is. result: as long as this rank's part.
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
