"""Reduce to a root along a binomial tree: half of the ranks hand their partial sums on and are done, and so on.

    4 ranks, root 0:   1 -> 0, 3 -> 2;   2 -> 0
"""

from __future__ import annotations

from hvdlite.algorithms.pipeline import chunk_length
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def only_sends(transport: Transport, root: int) -> bool:
    """Whether this rank receives nothing, and so leaves its buffer as it is but for the prescaling."""
    return (transport.rank - root) % transport.size % 2 == 1


def reduce_to_root(transport: Transport, buffer: Array, scratch: Array, root: int, reduction: Reduction) -> None:
    """Binomial tree. ceil(log2 p) rounds, at most n elements sent per rank, n log2(p) received by the root.

    buffer: flat, contiguous, any length n, the same on every rank; afterwards the root's holds the reduction, the
    others' hold partial sums, or (see `only_sends`) what they held. scratch: flat, same dtype, `chunk_length` of n; of
    any length where this rank only sends. Long ones go in chunks. root: a rank of the transport.
    """
    rank, size = transport.rank, transport.size
    reduction.prescale(buffer)
    length = max(chunk_length(buffer.size, buffer), 1)
    chunks = [buffer[start : start + length] for start in range(0, buffer.size, length)]
    place, distance = (rank - root) % size, 1  # places count from the root
    while distance < size:
        if place & distance:
            for chunk in chunks:
                transport.send(chunk, (rank - distance) % size)
            return
        for chunk in chunks if place + distance < size else ():
            incoming = scratch[: chunk.size]
            transport.receive(incoming, (rank + distance) % size)
            reduction.combine(chunk, incoming)
        distance *= 2
    reduction.postscale(buffer)
