"""Reduce-scatter of a bucket: each rank gets the results of its pieces of the gradients.

    rank 0's buffer     [ w1  .   | w2  .   ]      each rank has the results where it owns a piece;
    rank 1's buffer     [ .   w1  | .   w2  ]      elsewhere the values are of no use

On one host each rank adds up its pieces of all buffers, in rank order, as the two-shot does: the same bits. Over a
network the pieces are packed by rank, and travel as in `hvd.reducescatter`. Price: n(p-1)/p elements sent per rank,
half of an all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.shared import adder, in_blocks
from hvdlite.arrays import Array, is_host, module
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.reductions import reduce_scatter

Parts = Sequence[Sequence[slice]]


def prepared_scatter(
    at: Workplace, buffer: Array, peers: Sequence[Array] | None, parts: Parts, how: Reduction
) -> Callable[[], None]:
    """A function, for many calls, that puts the reduction into this rank's part of its buffer. Runs on the lane.

    Args:
        at: The workplace.
        buffer: This rank's flat array. Elements of other ranks' parts keep their values.
        peers: The flat arrays of the host's ranks; None if they share no memory.
        parts: For each rank the elements whose result it needs.
        how: The operation and its scaling.
    """
    if peers is not None and at.place.one_host:
        return in_memory(at, peers, parts, how)
    return by_messages(at, buffer, parts, how)


def in_memory(at: Workplace, peers: Sequence[Array], parts: Parts, how: Reduction) -> Callable[[], None]:
    """A function that adds up this rank's part of all buffers. Price: n/p elements read of each; a barrier.

    Every rank has finished writing its buffer when the function is called, because the roll call before it is a
    barrier.
    """
    rank, barrier = at.transport.rank, at.transport.barrier
    blocks = [block for piece in parts[rank] for block in in_blocks([peer[piece] for peer in peers], how)]
    add_up = adder(peers, how)
    read_by_others = sum(peers[rank][each].nbytes for other, its in enumerate(parts) if other != rank for each in its)

    def scatter() -> None:
        at.transport.tally.in_memory(read_by_others)
        for block in blocks:
            mine, before, after = block[rank], block[:rank], block[rank + 1 :]
            if not is_host(mine):
                add_up([mine, *before, *after], [mine])
            else:  # sums begin with ranks 0 and 1, and end where this rank's addend lies
                add_up([*before, mine.copy() if rank > 1 else mine, *after], [mine])
        barrier()  # no rank writes to its buffer while another one reads it

    return scatter


def by_messages(at: Workplace, buffer: Array, parts: Parts, how: Reduction) -> Callable[[], None]:
    """A function that packs each rank's part, and exchanges the packed parts."""
    mine, join = parts[at.transport.rank], module(buffer).concatenate

    def scatter() -> None:
        packed = [join([buffer[each] for each in its]) if its else buffer[:0] for its in parts]
        result = packed[at.transport.rank]
        reduce_scatter(at, packed, result, how)
        start = 0
        for each in mine:
            stop = start + each.stop - each.start
            buffer[each] = result[start:stop]
            start = stop

    return scatter
