"""Reduction to a root along a binomial tree: in each round half of the remaining ranks send their partial sums.

    4 ranks, root 0:   1 -> 0, 3 -> 2;   2 -> 0

Price: ceil(log2 p) rounds. Each rank sends at most n elements; the root receives n log2(p).
"""

from __future__ import annotations

from hvdlite.algorithms.pipeline import chunk_length
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def only_sends(transport: Transport, root: int) -> bool:
    """Whether this rank receives no message, so that `reduce_to_root` only prescales its buffer."""
    return (transport.rank - root) % transport.size % 2 == 1


def reduce_to_root(transport: Transport, buffer: Array, scratch: Array, root: int, reduction: Reduction) -> None:
    """Reduce to one rank. ceil(log2 p) rounds; each rank sends at most n elements, and the root receives n log2(p).

    Long buffers go in chunks.

    Args:
        transport: The ranks that take part.
        buffer: Flat, contiguous, equally long on all ranks. Afterwards the root's buffer holds the reduction. The
            others hold partial sums, or (`only_sends`) their prescaled input.
        scratch: Flat, same dtype, `chunk_length` of n; any length if this rank only sends.
        root: A rank of the transport.
        reduction: The operation and its scaling.
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
