"""Two-shot all-reduce on memory that the ranks of one host share: no message carries a gradient.

    rank 0's buffer  [ 0 | 1 | 2 ]     rank r reads part r of all p buffers, adds, scales,
    rank 1's buffer  [ 0 | 1 | 2 ]     and writes the result into part r of all p buffers.
    rank 2's buffer  [ 0 | 1 | 2 ]

Every byte is read once and written once per rank, 2pS/M seconds at S bytes and a copy bandwidth of M: on one host
this is 2-3 times faster than any algorithm that sends messages (each of which costs a copy in and a copy out).
The work goes in blocks that stay in the L2 cache; between two of them Python should take little: at 4 us a block it was
a sixth of the time. Rejected: one-shot (each rank adds everything: p times the reads), into memory of each rank's own,
from two places in turn, with no barrier behind. Of what a step takes over none, with two ranks, 0.6 MB behind a CNN's
backward took a tenth less that way where the cores were far apart (writing what another core has just read takes 127 us
per 0.3 MB there, and 30 elsewhere), 0.4 MB behind a small MLP's a fifth more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from hvdlite.algorithms import fused
from hvdlite.algorithms.reduction import Reduction, assign, in_cache, scaling, widened
from hvdlite.algorithms.ring import part, same_part
from hvdlite.arrays import Array, accumulator, module
from hvdlite.transports import Transport

AddUp: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], None]
"""The reduction of these addends, in order, scaled, into each of these targets: the first of the addends, in any order,
or others in their places, but not on a GPU."""
NOTHING_LENT: Mapping[int, Array] = MappingProxyType({})
BLOCK_BYTES, WHOLE_BYTES = 256 * 1024, 2 << 20
"""The sum of a block stays in the L2 until it is written everywhere, also in one of 512 KiB. With 1 MiB of L2, 2 ranks,
at 16 and 64 MiB, sums and averages: 384 KiB 0-13 % more time but once (median 6), 128 KiB 0-4 % more, 64 KiB 5-15 %.
Parts of up to WHOLE_BYTES, which stay in the L3, take 8-13 % less as one block, longer ones 5-20 % more; so do those of
8 ranks from 16 MiB together on."""


def prepared(
    transport: Transport, buffers: Sequence[Array], reduction: Reduction, lent: Mapping[int, Array] = NOTHING_LENT
) -> Callable[[], None]:
    """The two-shot of these very buffers, to be called many times. Each call: 1 step, no bytes sent, 1 barrier.

    buffers: all ranks' flat buffers, in rank order, equally long, changed in place; every rank has finished writing its
    own before any rank calls (the roll call sees to it). Sums are taken in rank order, 16-bit floats in float32 with
    one rounding: the same bits in all buffers. lent: looked at in each call: by where they begin in this rank's part,
    its own addends that lie elsewhere, in host memory, and that nobody need have copied, since nobody else reads them.
    """
    rank = transport.rank
    pieces = same_part(buffers, transport.size, rank)
    blocks = [(block, anothers_first(block, rank)) for block in in_blocks(pieces, reduction)]
    add_up = adder(pieces, reduction)

    def two_shot() -> None:
        if lent:
            add_up_lent(pieces, rank, reduction, lent, add_up)
        else:
            for addends, targets in blocks:
                add_up(addends, targets)
        transport.barrier()  # without it a rank would read or change its buffer while others still write into it

    return two_shot


def prepared_at_home(
    transport: Transport, stages: Sequence[Array], reduction: Reduction
) -> Callable[[Array], None]:
    """The two-shot of arrays that lie elsewhere, on the host, and are as long as these places in shared memory:

        rank 0's array  [ 0 | 1 ] -> its stage [   | 1 ]      rank r copies the other parts in, adds part r of its
        rank 1's array  [ 0 | 1 ] -> its stage [ 0 |   ]      array and of the others' stages, writes it there, and
                                                              copies the other parts out again

    To be called with any number of arrays, changed in place; what is added, and how, as in `prepared`. 2S(p-1)/p bytes
    are copied for S, and each call has 2 barriers. Behind a call a rank may still be copying out of its stage: nobody
    else may write there before it has come to another barrier, and operations that follow each other here do not.
    """
    rank, mine = transport.rank, stages[transport.rank]
    pieces = same_part(stages, transport.size, rank)
    start, stop = part(mine, transport.size, rank)
    others = [slice(first, last) for first, last in ((0, start), (stop, mine.size)) if first < last]
    blocks, add_up = list(in_blocks(pieces, reduction)), adder(pieces, reduction)

    def two_shot(array: Array) -> None:
        for place in others:
            mine[place] = array[place]
        transport.barrier()
        end = start
        for block in blocks:
            begin, end = end, end + block[0].size
            block = (*block[:rank], array[begin:end], *block[rank + 1 :])
            add_up(block, anothers_first(block, rank))
        transport.barrier()
        for place in others:
            array[place] = mine[place]

    return two_shot


def add_up_lent(
    pieces: Sequence[Array], rank: int, reduction: Reduction, lent: Mapping[int, Array], add_up: AddUp
) -> None:
    """Add up these pieces, one of each rank; this rank's addends lie elsewhere where they are lent."""

    def where_they_are(start: int, stop: int | None) -> None:
        for block in in_blocks([piece[start:stop] for piece in pieces], reduction):
            add_up(block, anothers_first(block, rank))

    done = 0
    for start in sorted(lent):
        stop = start + lent[start].size
        where_they_are(done, start)
        for addend, *targets in in_blocks([lent[start], *(piece[start:stop] for piece in pieces)], reduction):
            add_up([*targets[:rank], addend, *targets[rank + 1 :]], anothers_first(targets, rank))
        done = stop
    where_they_are(done, None)


def anothers_first(block: Sequence[Array], rank: int) -> Sequence[Array]:
    """The same pieces, as targets, with another rank's first: one that has been read when the sum is written there.
    What another core has had is written in half the time while it is read than behind that, where cores are far apart:
    0.3 MB in 54 us instead of 95. Where they are near it takes the same."""
    return block if rank else [*block[1:2], block[0], *block[2:]]


def in_blocks(pieces: Sequence[Array], reduction: Reduction) -> Iterator[tuple[Array, ...]]:
    """Equally long flat pieces, BLOCK_BYTES of each at a time; short ones whole, unless copies are made of them."""
    first = pieces[0]
    short = first.nbytes <= WHOLE_BYTES and len(pieces) * first.nbytes <= 4 * WHOLE_BYTES and in_place(first, reduction)
    return in_cache(*pieces, step=first.size if short else BLOCK_BYTES // first.itemsize)


def in_place(like: Array, reduction: Reduction) -> bool:
    """Whether arrays like this are added where they lie."""
    return reduction.before == 1.0 and accumulator(like.dtype) == like.dtype


def adder(like: Sequence[Array], reduction: Reduction) -> AddUp:
    """What adds up blocks of these pieces."""
    first, before = like[0], reduction.before
    if fused.possible(like, reduction.operation):
        scales = scaling(reduction.after, reduction.divisor)
        return lambda addends, targets: fused.add_up(addends, len(targets), before, scales)
    if in_place(first, reduction):
        return adder_in_place(reduction, first)
    return adder_aside(reduction, widened(first[:0]))


def adder_in_place(reduction: Reduction, like: Array) -> AddUp:
    """The sum grows in the first target. Where all its scaling is one product, each target is given one: behind a
    training step NumPy takes 5 us less to multiply twice than to multiply and copy."""
    function, scale = reduction.function(like), reduction.postscaler(like)
    multiply, factor = module(like).multiply, reduction.factor(like)

    def add_up(addends: Sequence[Array], targets: Sequence[Array]) -> None:
        total, so_far = targets[0], addends[0]
        for addend in addends[1:]:
            so_far = function(so_far, addend, total)
        if factor is None:
            scale(total)
            for target in targets[1:]:
                target[...] = total
        else:
            for target in targets[1:]:
                multiply(total, factor, target)
            multiply(total, factor, total)

    return add_up


def adder_aside(reduction: Reduction, wide: Array) -> AddUp:
    """The sum grows in an array of its own, like `wide`; it is rounded once."""
    prescale, function, postscale = reduction.prescaler(wide), reduction.function(wide), reduction.postscaler(wide)

    def widely(addend: Array) -> Array:
        copy = widened(addend)
        prescale(copy)
        return copy

    def add_up(addends: Sequence[Array], targets: Sequence[Array]) -> None:
        total = widely(addends[0])
        for addend in addends[1:]:
            function(total, widely(addend), out=total)
        postscale(total)
        first = targets[0]
        assign(first, total)
        for target in targets[1:]:
            target[...] = first

    return add_up
