"""Two-shot all-reduce in memory that the ranks of one host share: no message carries a gradient.

    rank 0's buffer  [ 0 | 1 | 2 ]     rank r reads part r of all p buffers, adds, scales,
    rank 1's buffer  [ 0 | 1 | 2 ]     and writes the result into part r of all p buffers.
    rank 2's buffer  [ 0 | 1 | 2 ]

Price: each rank reads and writes every byte once per buffer part: 2pS/M seconds for S bytes, where the host copies M
bytes per second. That is 2-3 times faster than any algorithm by messages, which copies each message in and out. The
work goes in blocks that stay in the L2 cache, with little Python between two of them.

Rejected: one-shot (each rank adds everything, p times the reads); a separate result with two buffers in turn and no
second barrier (MEASURED.md, "Details").
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
"""Reduces the addends, in order, with scaling, into each of the targets.

The targets are the first addends, in any order. On the host they may be other arrays in the addends' places.
"""
NOTHING_LENT: Mapping[int, Array] = MappingProxyType({})
BLOCK_BYTES, WHOLE_BYTES = 256 * 1024, 2 << 20
"""Bytes of a block, whose sum stays in the L2 cache until it is written everywhere. Parts of up to WHOLE_BYTES stay in
the L3 cache and are one block (MEASURED.md, "Details").
"""


def prepared(
    transport: Transport, buffers: Sequence[Array], reduction: Reduction, lent: Mapping[int, Array] = NOTHING_LENT
) -> Callable[[], None]:
    """The two-shot of these buffers, for many calls. Each call: 1 step, no bytes sent, 1 barrier.

    Sums are taken in rank order, for 16-bit floats in float32 with one rounding: the same bits in all buffers.

    Args:
        transport: The ranks of this host.
        buffers: All ranks' flat buffers in rank order, equally long, changed in place. Every rank has finished writing
            its own buffer before any rank calls; the roll call guarantees that.
        reduction: The operation and its scaling.
        lent: Read at each call: this rank's addends that lie elsewhere in host memory, by their start in this rank's
            part. No other rank reads that part, so they need not be copied.
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
    """The two-shot of arrays outside shared memory, as long as these stages in shared memory.

        rank 0's array  [ 0 | 1 ] -> its stage [   | 1 ]      rank r copies the other parts in, adds part r of its
        rank 1's array  [ 0 | 1 ] -> its stage [ 0 |   ]      array and of the others' stages, writes it there, and
                                                              copies the other parts out again

    Price of each call: 2S(p-1)/p bytes copied for S, and 2 barriers. Call it with any number of arrays; they change in
    place. The arithmetic is that of `prepared`. After a call a rank may still copy out of its stage: no other rank may
    write there before the next barrier, and later operations here do not.
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
    """Add up these pieces, one of each rank. Where this rank's addends are lent, use them."""

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
    """The same pieces as targets, with another rank's piece first, because that one has just been read.

    Where cores are far apart, writing a line that another core has had is faster just after reading it (MEASURED.md,
    "Details").
    """
    return block if rank else [*block[1:2], block[0], *block[2:]]


def in_blocks(pieces: Sequence[Array], reduction: Reduction) -> Iterator[tuple[Array, ...]]:
    """Equally long flat pieces, BLOCK_BYTES of each at a time. Short ones stay whole, unless they are copied."""
    first = pieces[0]
    short = first.nbytes <= WHOLE_BYTES and len(pieces) * first.nbytes <= 4 * WHOLE_BYTES and in_place(first, reduction)
    return in_cache(*pieces, step=first.size if short else BLOCK_BYTES // first.itemsize)


def in_place(like: Array, reduction: Reduction) -> bool:
    """Whether arrays like this are added without a wider copy."""
    return reduction.before == 1.0 and accumulator(like.dtype) == like.dtype


def adder(like: Sequence[Array], reduction: Reduction) -> AddUp:
    """The function that adds up blocks of these pieces."""
    first, before = like[0], reduction.before
    if fused.possible(like, reduction.operation):
        scales = scaling(reduction.after, reduction.divisor)
        return lambda addends, targets: fused.add_up(addends, len(targets), before, scales)
    if in_place(first, reduction):
        return adder_in_place(reduction, first)
    return adder_aside(reduction, widened(first[:0]))


def adder_in_place(reduction: Reduction, like: Array) -> AddUp:
    """The sum grows in the first target.

    If all scaling is one product, each target gets its own product, which NumPy does faster than a product and copies.
    """
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
    """The sum grows in a separate array like `wide`, and is rounded once."""
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
