"""The ring's counterpart for 16-bit floats: as many bytes and steps, but what travels is numbers, not partial sums.

    step s of reduce-scatter, rank r:  send part r+s of mine -> r+s,  receive part r of rank r-s, add it in float32

In a ring a partial sum passes p-1 ranks and is rounded to 16 bits at each. Here each rank adds up one part of all
ranks' arrays and rounds it once. What is sent stays 16 bits wide. Each rank talks to every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.algorithms.movement import prepared_allgather
from hvdlite.algorithms.pipeline import Step, prepared_steps
from hvdlite.algorithms.reduction import Reduction, assign, widened
from hvdlite.algorithms.ring import parts
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def prepared_reduce_scatter(
    transport: Transport, pieces: Sequence[Array], scratch: Array, reduction: Reduction
) -> Callable[[], None]:
    """What leaves in rank r's piece r the scaled reduction of all ranks' pieces r; to be called many times.

    p-1 steps, n(p-1)/p elements sent per rank. pieces: p flat arrays of 16-bit floats; the others stay as they are.
    scratch: `pipeline.scratch_length` of the longest piece, same dtype.
    """
    rank, size = transport.rank, transport.size
    mine = pieces[rank]
    total = widened(mine)
    steps = [
        Step(pieces[(rank + step) % size], (rank + step) % size, total, (rank - step) % size) for step in range(1, size)
    ]
    exchange = prepared_steps(transport, steps, scratch, reduction)
    prescale, postscale = reduction.prescaler(total), reduction.postscaler(total)

    def reduce_scatter() -> None:
        total[...] = widened(mine)
        prescale(total)
        exchange()
        postscale(total)
        assign(mine, total)

    return reduce_scatter


def prepared(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> Callable[[], None]:
    """The all-reduce of this very buffer, to be called many times. 2(p-1) steps, 2n(p-1)/p elements sent per rank.

    buffer: flat, contiguous 16-bit floats, any length n, changed in place. scratch: flat, same dtype,
    `pipeline.scratch_length` of `ring.longest_part`. Each element's sum is finished by one rank and copied by the
    others: all end with the same bits.
    """
    pieces = parts(buffer, transport.size)
    reduce_scatter = prepared_reduce_scatter(transport, pieces, scratch, reduction)
    allgather = prepared_allgather(transport, pieces, first=0)

    def direct() -> None:
        reduce_scatter()
        allgather()

    return direct
