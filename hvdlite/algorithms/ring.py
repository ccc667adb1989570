"""Ring all-reduce, the plain algorithm of the house: each rank talks to its two neighbours only.

    step s of reduce-scatter, rank r:  send part r-s   ->  r+1,   receive part r-s-1, add it to mine
    step s of all-gather,     rank r:  send part r-s+1 ->  r+1,   receive part r-s

Bandwidth-optimal on any number of ranks; its p-1 steps per half make it slow for small messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from hvdlite.algorithms.movement import prepared_allgather
from hvdlite.algorithms.pipeline import Step, prepared_steps
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, per_line
from hvdlite.transports import Transport


def bounds(total: int, count: int, unit: int = 1) -> list[int]:
    """Where `count` parts of nearly equal length begin, in whole units, the first ones longer by one; and where the
    last one ends."""
    return [bound(total, count, index, unit) for index in range(count + 1)]


def bound(total: int, count: int, index: int, unit: int) -> int:
    length, longer = divmod(-(-total // unit), count)
    return min(total, unit * (index * length + min(index, longer)))


def parts(buffer: Array, count: int) -> list[Array]:
    """The flat buffer in `count` contiguous parts of nearly equal length, in whole cache lines counted from its start;
    of a short buffer the last ones are empty."""
    return [buffer[start:stop] for start, stop in pairwise(bounds(buffer.size, count, per_line(buffer)))]


def part(buffer: Array, count: int, index: int) -> tuple[int, int]:
    """Where the part of this index begins and ends, as `parts` cuts them."""
    total, line = buffer.size, per_line(buffer)
    return bound(total, count, index, line), bound(total, count, index + 1, line)


def same_part(buffers: Sequence[Array], count: int, index: int) -> list[Array]:
    """Of each of these equally long buffers the part of this index."""
    start, stop = part(buffers[0], count, index)
    return [buffer[start:stop] for buffer in buffers]


def longest_part(buffer: Array, count: int) -> int:
    """Elements of the first of `parts`."""
    return bound(buffer.size, count, 1, per_line(buffer))


def prepared_reduce_scatter(
    transport: Transport, pieces: list[Array], scratch: Array, reduction: Reduction
) -> Callable[[], None]:
    """What leaves in rank r's piece r+1 (mod p) the reduction of all ranks' pieces r+1; to be called many times.

    p-1 steps, n(p-1)/p elements sent per rank. pieces: p flat arrays, changed in place (the others hold partial
    sums afterwards); scratch: `pipeline.scratch_length` of the longest piece, same dtype.
    """
    rank, size = transport.rank, transport.size
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    steps = [
        Step(pieces[(rank - step) % size], ahead, pieces[(rank - step - 1) % size], behind) for step in range(size - 1)
    ]
    return prepared_steps(transport, steps, scratch, reduction)


def prepared(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> Callable[[], None]:
    """The ring all-reduce of this very buffer, to be called many times: to cut it in parts takes as long as to send
    some kilobytes. Each call: 2(p-1) steps, 2n(p-1)/p elements sent per rank, 2(p-1) MPI calls (Patarasuk & Yuan 2009).

    buffer: flat, contiguous, any length n, changed in place. scratch: flat, same dtype, `pipeline.scratch_length` of
    `longest_part`. Long parts are sent and added in chunks; the all-gather, which adds nothing, sends them whole.
    Each element's sum is finished and scaled by one rank and copied by the others: all end with the same bits.
    16-bit floats go by `direct` instead.
    """
    pieces = parts(buffer, transport.size)
    finished = pieces[(transport.rank + 1) % transport.size]
    reduce_scatter = prepared_reduce_scatter(transport, pieces, scratch, reduction)
    allgather = prepared_allgather(transport, pieces, first=1)
    prescale, postscale = reduction.prescaler(buffer), reduction.postscaler(buffer)

    def ring() -> None:
        prescale(buffer)
        reduce_scatter()
        postscale(finished)
        allgather()

    return ring
