"""Hierarchical all-reduce: in shared memory within each host, by messages between hosts, with all drivers at once.

    host A   0 [ a | b ]   1 [ a | b ]        1.  driver 0 of each host adds part a of its host's buffers, driver 1 b
    host B   2 [ a | b ]   3 [ a | b ]        2.  0 and 2 all-reduce a over the network while 1 and 3 all-reduce b
                                              3.  each writes its part into all its host's buffers

Price: each host sends 2S(h-1)/h bytes for S bytes and h hosts, the least possible. A flat ring over p ranks sends
2S(p-1)/p through the same network card. All drivers send at once, which keeps all queues of the card busy. Rejected:
one leader per host, since one core would feed the network while the other ranks wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import borders as equal_borders
from hvdlite.algorithms.shared import adder, crossing_bytes, in_blocks
from hvdlite.arrays import Array, is_small_float
from hvdlite.transports import Transport
from hvdlite.transports.two_levels import Levels

Between = Callable[[Transport, Array, Reduction], Callable[[], None]]
"""Prepares an in-place all-reduce of a flat array over a transport's ranks, for many calls."""


def of_levels(reduction: Reduction, like: Array, fullest: int) -> tuple[Reduction, Reduction]:
    """The reduction within each host, and the one between hosts.

    Within a host, sums of 16-bit floats are rounded to 16 bits, and might overflow. So each host divides its sum by
    `fullest`, the largest number of ranks on one host.
    """
    if not is_small_float(like.dtype) or reduction.operation != "sum":
        return replace(reduction, after=1.0, divisor=1), replace(reduction, before=1.0)
    scaled = Reduction(before=reduction.before * reduction.after)
    if reduction.divisor == 1:
        return scaled, Reduction()
    rest, left = divmod(reduction.divisor, fullest)
    across = Reduction(after=float(fullest), divisor=reduction.divisor) if left else Reduction(divisor=rest)
    return replace(scaled, divisor=fullest), across


def prepared(
    levels: Levels,
    buffers: Sequence[Array],
    reduction: Reduction,
    between: Between,
    borders: Sequence[int] | None = None,
) -> Callable[[], None]:
    """A function that does the hierarchical all-reduce of these buffers, for many calls.

    It is a reduce-scatter in shared memory, an all-reduce between hosts, and an all-gather in shared memory. Price:
    with d drivers on each of h hosts, each host sends 2S(h-1)/h bytes for S bytes, S/d at each driver. The steps are
    those of `between` at h ranks, and 1 local barrier. Each element's sum is computed once and copied: the same bits on
    all ranks. 16-bit floats cross the network as 16 bits: each host's result is rounded, and the final one again.

    Args:
        levels: The ranks of this host, and the drivers of this rank's column.
        buffers: This host's flat buffers in local rank order, changed in place. Every rank of the job has finished
            writing its own buffer before any rank calls the function.
        reduction: The operation and its scaling.
        between: Prepares the all-reduce between hosts.
        borders: Drivers + 1 elements: the part of driver k is from border k to border k+1. None: equal parts.
    """
    local, rank = levels.local, levels.local.rank
    buffer = buffers[rank]

    def finish(crossing: int) -> None:
        local.tally.in_memory(crossing)
        local.barrier()  # as in the two-shot: no rank reads before all have written

    if levels.cross is None:
        return partial(finish, crossing_bytes(buffer, buffer[:0], local.size))
    start, stop = (borders or equal_borders(buffers[0], levels.drivers))[rank : rank + 2]
    pieces = [buffer[start:stop] for buffer in buffers]
    mine = pieces.pop(rank)
    within, across = of_levels(reduction, mine, levels.fullest)
    blocks, add_up = list(in_blocks([mine, *pieces], within)), adder([mine, *pieces], within)
    allreduce, crossing = between(levels.cross, mine, across), crossing_bytes(buffer, mine, local.size)

    def hierarchical() -> None:
        for block in blocks:
            add_up(block, block[:1])
        allreduce()
        for total, *targets in blocks:
            for target in targets:
                target[...] = total
        finish(crossing)

    return hierarchical
