"""Recursive halving and doubling: log2(p) steps each way, for messages too short for a ring.

    4 ranks:   0-1  2-3   exchange halves (distance 2^k: rank XOR 2^k), keep and add one half
               0-2  1-3   exchange quarters ...; then back the same way, gathering

Price: 2 log2(p) steps; each rank sends 2n(p-1)/p elements. `doubling` sends whole buffers in half the steps, which is
faster for the shortest messages. If p is no power of two, let q be the next lower one. The first 2(p - q) ranks fold in
pairs: the even rank sends its buffer to the odd one, which takes part for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.algorithms.pipeline import Step, prepared_steps
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport

Core = Callable[[Transport, Array, Array, Reduction, int, Sequence[int]], None]


def halving_doubling(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """All-reduce by recursive halving and doubling (Thakur, Rabenseifner & Gropp 2005).

    Price: 2 log2(p) steps; each rank sends 2n(p-1)/p elements. If p is no power of two, a folded pair takes 2 more
    steps and sends 2n more elements. One rank finishes and scales each element's sum: all have the same bits.

    Args:
        transport: The ranks that take part.
        buffer: Flat, contiguous, any length n, changed in place.
        scratch: Flat, same dtype, at least n elements.
        reduction: The operation and its scaling.
    """
    fold(transport, buffer, scratch, reduction, exchange_halves)


def doubling(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """All-reduce by recursive doubling. log2(p) steps; each rank sends n log2(p) elements. Folds like
    `halving_doubling`.

    Partners add the same two operands in the same order, the lower rank's first: all have the same bits. The arguments
    are those of `halving_doubling`.
    """
    fold(transport, buffer, scratch, reduction, exchange_all)


def fold(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction, core: Core) -> None:
    """Run `core` among a power of two of ranks: the odd ranks of the folded pairs, and all unfolded ranks."""
    rank, size = transport.rank, transport.size
    reduction.prescale(buffer)
    power = 1 << (size.bit_length() - 1)
    folded = size - power
    if rank < 2 * folded and rank % 2 == 0:
        transport.send(buffer, rank + 1)
        transport.receive(buffer, rank + 1)
        return
    if rank < 2 * folded:
        incoming = scratch[: buffer.size]
        transport.receive(incoming, rank - 1)
        reduction.combine(buffer, incoming)
    place = rank // 2 if rank < 2 * folded else rank - folded
    members = [2 * other + 1 if other < folded else other + folded for other in range(power)]
    core(transport, buffer, scratch, reduction, place, members)
    if rank < 2 * folded:
        transport.send(buffer, rank - 1)


def exchange_all(
    transport: Transport, buffer: Array, scratch: Array, reduction: Reduction, place: int, members: Sequence[int]
) -> None:
    """Exchange whole buffers with the partner at distance 1, 2, 4, ..., and add."""
    incoming, distance = scratch[: buffer.size], 1
    while distance < len(members):
        partner = members[place ^ distance]
        transport.exchange(buffer, partner, incoming, partner)
        if place & distance == 0:
            reduction.combine(buffer, incoming)
        else:
            reduction.combine(incoming, buffer)
            buffer[...] = incoming
        distance *= 2
    reduction.postscale(buffer)


def exchange_halves(
    transport: Transport, buffer: Array, scratch: Array, reduction: Reduction, place: int, members: Sequence[int]
) -> None:
    """Halve the part that each rank is responsible for, log2(p) times; then gather with the same steps in reverse."""
    start, stop, distance = 0, buffer.size, 1
    steps: list[tuple[int, Array, Array]] = []
    while distance < len(members):
        middle = start + (stop - start + 1) // 2
        keep, give = (start, middle), (middle, stop)
        if place & distance:
            keep, give = give, keep
        partner, mine, theirs = members[place ^ distance], buffer[slice(*keep)], buffer[slice(*give)]
        prepared_steps(transport, [Step(theirs, partner, mine, partner)], scratch, reduction)()
        steps.append((partner, mine, theirs))
        start, stop = keep
        distance *= 2
    reduction.postscale(buffer[start:stop])
    for partner, mine, theirs in reversed(steps):
        transport.exchange(mine, partner, theirs, partner)
