"""Hierarchical all-reduce: in shared memory within each host, over the network between hosts, all drivers at once.

    host A   0 [ a | b ]   1 [ a | b ]        1.  driver 0 of each host adds part a of its host's buffers, driver 1 b
    host B   2 [ a | b ]   3 [ a | b ]        2.  0 and 2 all-reduce a over the network while 1 and 3 all-reduce b
                                              3.  each writes its part into all its host's buffers

Per host only 2S(h-1)/h bytes leave for S bytes and h hosts, the least possible; a flat ring over p ranks sends
2S(p-1)/p through the same network cards. That every driver sends its own part keeps all queues of the card busy.
Rejected: one leader per host (one core feeds the network while the others wait).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import same_part
from hvdlite.algorithms.shared import adder, in_blocks
from hvdlite.arrays import Array, is_small_float
from hvdlite.transports import Transport
from hvdlite.transports.two_levels import Levels

Between = Callable[[Transport, Array, Reduction], Callable[[], None]]
"""What prepares an all-reduce in place of a flat array over a transport's ranks, to be called many times."""


def of_levels(reduction: Reduction, like: Array, fullest: int) -> tuple[Reduction, Reduction]:
    """The arithmetic within each host and between them. What 16-bit floats become within a host is rounded to 16 bits,
    which hold an average, while they may not hold its sum: so each host divides by the ranks of the `fullest`."""
    if not is_small_float(like.dtype) or reduction.operation != "sum":
        return replace(reduction, after=1.0, divisor=1), replace(reduction, before=1.0)
    scaled = Reduction(before=reduction.before * reduction.after)
    if reduction.divisor == 1:
        return scaled, Reduction()
    rest, left = divmod(reduction.divisor, fullest)
    across = Reduction(after=float(fullest), divisor=reduction.divisor) if left else Reduction(divisor=rest)
    return replace(scaled, divisor=fullest), across


def prepared(
    levels: Levels, buffers: Sequence[Array], reduction: Reduction, between: Between
) -> Callable[[], None]:
    """Reduce-scatter in shared memory, `between` drivers of h hosts on a d-th of the buffer each, all-gather in memory:
    for these very buffers, to be called many times.

    Each call: 2S(h-1)/h bytes sent per host (S bytes, d drivers per host), in the steps of `between` at h ranks; 1
    local barrier.

    buffers: this host's flat buffers, in local rank order, changed in place; every rank of the job has finished
    writing its own before any calls this. The sum of each element takes one way and is copied: the same bits on all
    ranks. 16-bit floats cross the network as 16 bits: each host's sum, or average, is rounded, and the whole once more.
    """
    barrier = levels.local.barrier  # as in the two-shot: nobody looks before all have written
    if levels.cross is None:
        return barrier
    rank = levels.local.rank
    pieces = same_part(buffers, levels.drivers, rank)
    mine = pieces.pop(rank)
    within, across = of_levels(reduction, mine, levels.fullest)
    blocks, add_up = list(in_blocks([mine, *pieces], within)), adder([mine, *pieces], within)
    allreduce = between(levels.cross, mine, across)

    def hierarchical() -> None:
        for block in blocks:
            add_up(block, block[:1])
        allreduce()
        for total, *targets in blocks:
            for target in targets:
                target[...] = total
        barrier()

    return hierarchical
