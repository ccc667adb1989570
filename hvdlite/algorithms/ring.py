"""Ring all-reduce: each rank exchanges messages with its two neighbours only.

    step s of reduce-scatter, rank r:  send part r-s   ->  r+1,   receive part r-s-1, add it to mine
    step s of all-gather,     rank r:  send part r-s+1 ->  r+1,   receive part r-s

Price: 2(p-1) steps; each rank sends 2n(p-1)/p elements, the least possible on any number of ranks. The many steps make
it slow for short messages.
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
    """The begins of `count` parts of nearly equal length, and the end of the last one.

    Parts are multiples of `unit`, and the first ones are longer.
    """
    return [bound(total, count, index, unit) for index in range(count + 1)]


def bound(total: int, count: int, index: int, unit: int) -> int:
    """One of `bounds`."""
    length, longer = divmod(-(-total // unit), count)
    return min(total, unit * (index * length + min(index, longer)))


def borders(buffer: Array, count: int) -> list[int]:
    """The begins of `parts`, and the end of the last one."""
    return bounds(buffer.size, count, per_line(buffer))


def parts(buffer: Array, count: int) -> list[Array]:
    """The flat buffer in `count` contiguous parts of nearly equal length, in whole cache lines from its start.

    The last parts of a short buffer are empty.
    """
    return [buffer[start:stop] for start, stop in pairwise(borders(buffer, count))]


def part(buffer: Array, count: int, index: int) -> tuple[int, int]:
    """The begin and end of one of `parts`."""
    total, line = buffer.size, per_line(buffer)
    return bound(total, count, index, line), bound(total, count, index + 1, line)


def same_part(buffers: Sequence[Array], count: int, index: int) -> list[Array]:
    """The part with this index of each buffer. The buffers are equally long."""
    start, stop = part(buffers[0], count, index)
    return [buffer[start:stop] for buffer in buffers]


def longest_part(buffer: Array, count: int) -> int:
    """The length of the first of `parts`."""
    return bound(buffer.size, count, 1, per_line(buffer))


def prepared_reduce_scatter(
    transport: Transport, pieces: list[Array], scratch: Array, reduction: Reduction
) -> Callable[[], None]:
    """A function, for many calls, that puts the reduction of all ranks' pieces r+1 (mod p) into rank r's piece r+1.

    Price: p-1 steps; each rank sends n(p-1)/p elements.

    Args:
        transport: The ranks that take part.
        pieces: p flat arrays, changed in place. The other pieces hold partial sums afterwards.
        scratch: `pipeline.scratch_length` of the longest piece, same dtype.
        reduction: The operation.
    """
    rank, size = transport.rank, transport.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    steps = [
        Step(pieces[(rank - step) % size], following, pieces[(rank - step - 1) % size], previous)
        for step in range(size - 1)
    ]
    return prepared_steps(transport, steps, scratch, reduction)


def prepared(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> Callable[[], None]:
    """A function that does the ring all-reduce of this buffer, for many calls (Patarasuk & Yuan 2009).

    Price of each call: 2(p-1) steps; each rank sends 2n(p-1)/p elements in 2(p-1) MPI calls. The reduce-scatter sends
    and adds long parts in chunks, and the all-gather sends whole parts. One rank finishes and scales each element's
    sum, and the others copy it: all have the same bits. For 16-bit floats use `direct`.

    Args:
        transport: The ranks that take part.
        buffer: Flat, contiguous, any length n, changed in place.
        scratch: Flat, same dtype, `pipeline.scratch_length` of `longest_part`.
        reduction: The operation and its scaling.
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
