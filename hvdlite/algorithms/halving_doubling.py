"""Recursive halving and doubling: log2(p) steps each way, for messages too small to fill a ring.

    4 ranks:   0-1  2-3   exchange halves (distance 2^k: rank XOR 2^k), keep and add one half
               0-2  1-3   exchange quarters ...; then back the same way, gathering

Where p is no power of two, the first 2(p - 2^k) ranks fold in pairs: the even one hands its buffer to the odd one,
which takes part for both, and gets the result at the end.
"""

from __future__ import annotations

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def halving_doubling(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """Recursive halving-doubling all-reduce. 2 log2(p) steps, 2n(p-1)/p elements sent per rank
    (Thakur, Rabenseifner & Gropp 2005); 2 steps and 2n more for the folded ranks where p is no power of two.

    buffer: flat, contiguous, any length n, changed in place. scratch: flat, same dtype, length >= n (n/2 where p
    is a power of two). Every element's sum is finished and scaled by one rank: all end with the same bits.
    """
    rank, size = transport.rank, transport.size
    reduction.prescale(buffer)
    core = 1 << (size.bit_length() - 1)
    folded = size - core
    if rank < 2 * folded and rank % 2 == 0:
        transport.send(buffer, rank + 1)
        transport.receive(buffer, rank + 1)
        return
    if rank < 2 * folded:
        incoming = scratch[: buffer.size]
        transport.receive(incoming, rank - 1)
        reduction.combine(buffer, incoming)
    exchange_halves(transport, buffer, scratch, reduction, core, folded)
    if rank < 2 * folded:
        transport.send(buffer, rank - 1)


def exchange_halves(
    transport: Transport, buffer: Array, scratch: Array, reduction: Reduction, core: int, folded: int
) -> None:
    """The power-of-two part, among `core` ranks: the odd ones of the folded pairs and all the unfolded."""
    place = transport.rank // 2 if transport.rank < 2 * folded else transport.rank - folded
    real = [2 * other + 1 if other < folded else other + folded for other in range(core)]
    start, stop, distance = 0, buffer.size, 1
    halves: list[tuple[int, int, int, int, int]] = []
    while distance < core:
        middle = start + (stop - start + 1) // 2
        lower = place & distance == 0
        keep, give = ((start, middle), (middle, stop)) if lower else ((middle, stop), (start, middle))
        partner, mine = real[place ^ distance], buffer[keep[0] : keep[1]]
        incoming = scratch[: mine.size]
        transport.exchange(buffer[give[0] : give[1]], partner, incoming, partner)
        reduction.combine(mine, incoming)
        halves.append((partner, *keep, *give))
        start, stop = keep
        distance *= 2
    reduction.postscale(buffer[start:stop])
    for partner, kept, kept_stop, given, given_stop in reversed(halves):
        transport.exchange(buffer[kept:kept_stop], partner, buffer[given:given_stop], partner)
