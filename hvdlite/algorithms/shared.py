"""Two-shot all-reduce on memory that the ranks of one host share: no message carries a gradient.

    rank 0's buffer  [ 0 | 1 | 2 ]     rank r reads part r of all p buffers, adds, scales,
    rank 1's buffer  [ 0 | 1 | 2 ]     and writes the result into part r of all p buffers.
    rank 2's buffer  [ 0 | 1 | 2 ]

Every byte is read once and written once per rank, 2pS/M seconds at S bytes and a copy bandwidth of M: on one host
this is 2-3 times faster than any algorithm that sends messages (each of which costs a copy in and a copy out).
The work goes in blocks that stay in the L2 cache; between two of them Python should take little: at 4 us a block it was
a sixth of the time. Rejected: one-shot (each rank adds everything: p times the reads).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from hvdlite.algorithms import fused
from hvdlite.algorithms.reduction import Reduction, assign, in_cache, scaling, widened
from hvdlite.algorithms.ring import same_part
from hvdlite.arrays import Array, accumulator
from hvdlite.transports import Transport

AddUp: TypeAlias = Callable[[Sequence[Array], int], None]
"""From blocks of p buffers, and how many of them, from the first, are to hold their reduction: in order, scaled."""
BLOCK_BYTES, WHOLE_BYTES = 384 * 1024, 2 << 20
"""The sum of a block stays in the L2 until it is written everywhere, also in one of 512 KiB. With 1 MiB of L2, 2 ranks,
at 4 and 16 MiB: 512 KiB 0-5 % less time, 256 KiB 4-10 % more, 128 KiB 15 % more, 64 KiB 45 % more. Parts of up to
WHOLE_BYTES, which stay in the L3, take 8-13 % less as one block, longer ones 5-20 % more; so do those of 8 ranks from
16 MiB together on."""


def prepared(transport: Transport, buffers: Sequence[Array], reduction: Reduction) -> Callable[[], None]:
    """The two-shot of these very buffers, to be called many times. Each call: 1 step, no bytes sent, 1 barrier.

    buffers: all ranks' flat buffers, in rank order, equally long, changed in place; every rank has finished writing its
    own before any rank calls (the roll call sees to it). Sums are taken in rank order, 16-bit floats in float32 with
    one rounding: the same bits in all buffers.
    """
    pieces = same_part(buffers, transport.size, transport.rank)
    blocks, add_up = list(in_blocks(pieces, reduction)), adder(pieces, reduction)

    def two_shot() -> None:
        for block in blocks:
            add_up(block, len(block))
        transport.barrier()  # without it a rank would read or change its buffer while others still write into it

    return two_shot


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
        return lambda blocks, targets: fused.add_up(blocks, targets, before, scales)
    if in_place(first, reduction):
        return adder_in_place(reduction, first)
    return adder_aside(reduction, widened(first[:0]))


def adder_in_place(reduction: Reduction, like: Array) -> AddUp:
    """The sum grows in the first block."""
    function = reduction.function(like)
    scale = reduction.postscaler(like)

    def add_up(blocks: Sequence[Array], targets: int) -> None:
        total = blocks[0]
        for block in blocks[1:]:
            function(total, block, out=total)
        scale(total)
        for block in blocks[1:targets]:
            block[...] = total

    return add_up


def adder_aside(reduction: Reduction, wide: Array) -> AddUp:
    """The sum grows in an array of its own, like `wide`; it is rounded once."""
    prescale, function, postscale = reduction.prescaler(wide), reduction.function(wide), reduction.postscaler(wide)

    def addend(block: Array) -> Array:
        copy = widened(block)
        prescale(copy)
        return copy

    def add_up(blocks: Sequence[Array], targets: int) -> None:
        total = addend(blocks[0])
        for block in blocks[1:]:
            function(total, addend(block), out=total)
        postscale(total)
        assign(blocks[0], total)
        for block in blocks[1:targets]:
            block[...] = blocks[0]

    return add_up
