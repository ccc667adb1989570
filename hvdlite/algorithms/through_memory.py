"""All-reduce and reduce-scatter between the ranks of one host, through the staging arena.

    all-reduce       each rank copies the others' parts in, adds its part of all ranks, and copies the others' sums out
    reduce-scatter   each rank copies the others' parts in, and adds what the others have copied in for it

Each rank's staging memory has two halves. Long arrays pass through in pieces, and the pieces use the halves in turn:

    half 0   | in 0 | add 0 | out 0, in 2 | add 2       | out 2       a column is the time between two barriers: one
    half 1   |      | in 1  | add 1       | out 1, in 3 | add 3       barrier per piece, and one at the end

Price: each byte that crosses is copied in, and added where it lies. Sums are copied out. By messages each byte would be
copied, and added afterwards. Below LEAST_BYTES a reduce-scatter's barriers cost more than messages. All-gather,
broadcast and all-to-all add nothing. They use messages, which an MPI copies once (MEASURED.md, "Details").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdlite.algorithms.choice import Place
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import part, same_part
from hvdlite.algorithms.shared import adder, anothers_first, crossing_bytes, in_blocks
from hvdlite.arrays import LINE, Array, DType, overlapping
from hvdlite.memory.arena import typed
from hvdlite.memory.workspace import Workspace
from hvdlite.transports import Transport

LEAST_BYTES = 32 * 1024
"""The shortest arrays that are reduced and scattered through memory."""


def memory_for(nbytes: int, transport: Transport, workspace: Workspace, place: Place) -> Sequence[Array] | None:
    """Every rank's staging memory in rank order, if an operation should use it; else None. Collective.

    Args:
        nbytes: The size of the largest array on any rank; equal on all ranks.
        transport: The ranks that take part.
        workspace: Keeps the staging arena.
        place: The facts about these ranks.
    """
    if not (place.in_memory and place.one_host) or nbytes < LEAST_BYTES:
        return None
    return workspace.staging(transport, place.hosts).peers


def halves(memory: Sequence[Array]) -> list[list[Array]]:
    """The first half of every rank's memory, and the second half, in whole cache lines."""
    room = memory[0].size // 2 // LINE * LINE
    return [[each[start : start + room] for each in memory] for start in (0, room)]


class Passage(NamedTuple):
    """The all-reduce of pieces of one length in one half: three functions of this rank's piece, and the price.

    Attributes:
        bring: Copies the parts that other ranks add into this rank's half.
        add: Adds this rank's part of all ranks' pieces. Writes the sum into the piece, and into the others' halves.
        take: Copies the parts that others have added out of this rank's half.
        crossing: The bytes that others read from this rank's half, and that this rank writes to theirs.
    """

    bring: Callable[[Array], None]
    add: Callable[[Array], None]
    take: Callable[[Array], None]
    crossing: int


def prepared_allreduce(
    transport: Transport, memory: Sequence[Array], length: int, dtype: DType, reduction: Reduction
) -> Callable[[Array], None]:
    """A function that all-reduces flat arrays of this length and dtype in place, for many calls.

        rank 0's array  [ 0 | 1 ] -> its half [   | 1 ]      rank r copies the other parts in, adds part r of its
        rank 1's array  [ 0 | 1 ] -> its half [ 0 |   ]      array and of the others' halves, writes it there, and
                                                             copies the other parts out again

    Price of each call: 2S(p-1)/p bytes copied for S; one barrier per piece, and one more. Each sum is computed once, in
    rank order: all ranks have the same bits. 16-bit floats are added in float32 and rounded once. After a call another
    rank may still copy from its half: no rank may write to other ranks' memory before the next barrier, and no
    operation here does.

    Args:
        transport: The ranks of this host.
        memory: Every rank's staging memory, in rank order.
        length: The number of elements, at least 1.
        dtype: The arrays' dtype.
        reduction: The operation and its scaling.
    """
    both = halves(memory)
    step = both[0][0].size // dtype.itemsize
    passages = {
        size: [passage(transport.rank, [typed(each, 0, size, dtype) for each in half], reduction) for half in both]
        for size in {min(step, length), length % step or min(step, length)}
    }
    starts = range(0, length, step)

    def allreduce(array: Array) -> None:
        pieces = [array[start : start + step] for start in starts]
        ways = [passages[piece.size][number % 2] for number, piece in enumerate(pieces)]
        ways[0].bring(pieces[0])
        for number, piece in enumerate(pieces):
            transport.barrier()
            if number > 0:
                ways[number - 1].take(pieces[number - 1])
            ways[number].add(piece)
            transport.tally.in_memory(ways[number].crossing)
            if number + 1 < len(pieces):
                ways[number + 1].bring(pieces[number + 1])
        transport.barrier()
        ways[-1].take(pieces[-1])

    return allreduce


def passage(rank: int, stages: Sequence[Array], reduction: Reduction) -> Passage:
    """The `Passage` through one half. stages: the half of every rank's memory, as long as the piece."""
    mine, size = stages[rank], len(stages)
    start, stop = part(mine, size, rank)
    others = [slice(first, last) for first, last in ((0, start), (stop, mine.size)) if first < last]
    pieces = same_part(stages, size, rank)
    blocks, add_up = list(in_blocks(pieces, reduction)), adder(pieces, reduction)

    def bring(array: Array) -> None:
        for place in others:
            mine[place] = array[place]

    def add(array: Array) -> None:
        end = start
        for block in blocks:
            begin, end = end, end + block[0].size
            block = (*block[:rank], array[begin:end], *block[rank + 1 :])
            add_up(block, anothers_first(block, rank))

    def take(array: Array) -> None:
        for place in others:
            array[place] = mine[place]

    return Passage(bring, add, take, crossing_bytes(mine, pieces[rank], size))


def reduce_scatter(
    transport: Transport, memory: Sequence[Array], parts: Sequence[Array], result: Array, reduction: Reduction
) -> None:
    """Copy the other ranks' parts in, and add up this rank's part in rank order.

    Price: one barrier per piece, and one at the end. Rejected: to copy each part into the memory of the rank that adds
    it. That is slower if exchanges between cores are slow, and that rank may still copy the previous result from its
    memory.

    Args:
        transport: The ranks of this host.
        memory: Every rank's staging memory.
        parts: A flat array for each rank, equally long on all ranks; not changed.
        result: As long as this rank's part. It may be that part.
        reduction: The operation and its scaling.
    """
    rank, size = transport.rank, transport.size
    both = halves(memory)
    room = both[0][0].size // size // LINE * LINE  # bytes for each rank's part
    step = room // result.itemsize
    add_up = adder([result], reduction)
    transport.tally.in_memory(sum(part.nbytes for other, part in enumerate(parts) if other != rank))
    overwrites = rank > 1 and overlapping([parts[rank], result]) is not None  # sums begin with ranks 0 and 1
    for number, start in enumerate(range(0, max(map(len, parts)), step)):
        half = both[number % 2]
        pieces = [part[start : start + step] for part in parts]
        for other, piece in enumerate(pieces):
            if other != rank:
                typed(half[rank], other * room, piece.size, piece.dtype)[:] = piece
        transport.barrier()
        mine = pieces[rank].copy() if overwrites else pieces[rank]
        target = result[start : start + step]
        addends = [
            mine if other == rank else typed(theirs, rank * room, mine.size, mine.dtype)
            for other, theirs in enumerate(half)
        ]
        for *block, total in in_blocks([*addends, target], reduction):
            add_up(block, [total])
    transport.barrier()
