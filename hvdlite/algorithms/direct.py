"""Direct all-reduce: the ring's replacement for 16-bit floats. It sends inputs instead of partial sums.

    step s of reduce-scatter, rank r:  send part r+s of mine -> r+s,  receive part r of rank r-s, add it in float32

In a ring each of p-1 ranks would round a partial sum to 16 bits. Here one rank adds up one part of all arrays in
float32, and rounds the sum once. Price: 2(p-1) steps; each rank sends 2n(p-1)/p elements, as in a ring, but to all
ranks.
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
    """A function, for many calls, that puts the scaled reduction of all ranks' pieces r into rank r's piece r.

    Price: p-1 steps; each rank sends n(p-1)/p elements.

    Args:
        transport: The ranks that take part.
        pieces: p flat arrays of 16-bit floats. Only this rank's own piece changes.
        scratch: `pipeline.scratch_length` of the longest piece, same dtype.
        reduction: The operation and its scaling.
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
    """A function that all-reduces this buffer, for many calls. 2(p-1) steps; each rank sends 2n(p-1)/p elements.

    One rank finishes each element's sum, and the others copy it: all have the same bits.

    Args:
        transport: The ranks that take part.
        buffer: 16-bit floats of any length n, flat and contiguous, changed in place.
        scratch: Flat, same dtype, `pipeline.scratch_length` of `ring.longest_part`.
        reduction: The operation and its scaling.
    """
    pieces = parts(buffer, transport.size)
    reduce_scatter = prepared_reduce_scatter(transport, pieces, scratch, reduction)
    allgather = prepared_allgather(transport, pieces, first=0)

    def direct() -> None:
        reduce_scatter()
        allgather()

    return direct
