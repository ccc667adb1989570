"""Two-shot all-reduce in memory that the ranks of one host share: no message carries a gradient.

    rank 0's buffer  [ 0 | 1 | 2 ]     rank r reads part r of all p buffers, adds, scales,
    rank 1's buffer  [ 0 | 1 | 2 ]     and writes the result into part r of all p buffers.
    rank 2's buffer  [ 0 | 1 | 2 ]

Price: p buffers are read once and written once, which takes 2pS/M seconds for S bytes, if the host copies M bytes per
second. Algorithms by messages copy each message in and out, and take 2-3 times as long. A rank works in blocks that
stay in the L2 cache, with little Python between them.

The roll call is the first barrier; the second follows the writes. `through_memory` reduces arrays outside an arena in
the same way, in pieces.

Rejected: a one-shot (each rank adds all buffers: p times the reads); separate result buffers, used in turn, without the
second barrier (MEASURED.md, "Details").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from hvdlite.algorithms import fused
from hvdlite.algorithms.reduction import Reduction, assign, in_cache, scaling, widened
from hvdlite.algorithms.ring import same_part
from hvdlite.arrays import Array, accumulator, module
from hvdlite.transports import Transport

AddUp: TypeAlias = Callable[[Sequence[Array], Sequence[Array]], None]
"""A function of addends and targets: reduces the addends, in order, with scaling, and writes the result to each target.

The targets are the first addends, and the first target is one of the first two. On the host they may be other arrays.
"""
NOTHING_LENT: Mapping[int, Array] = MappingProxyType({})
BLOCK_BYTES, WHOLE_BYTES = 256 * 1024, 2 << 20
"""Bytes of a block. A block's sum stays in the L2 cache until all targets are written. Parts of up to WHOLE_BYTES stay
in the L3 cache and are one block (MEASURED.md, "Details").
"""


def prepared(
    transport: Transport, buffers: Sequence[Array], reduction: Reduction, lent: Mapping[int, Array] = NOTHING_LENT
) -> Callable[[], None]:
    """A function that does the two-shot of these buffers, for many calls. Each call: 1 step, no messages, 1 barrier.

    Each sum is computed once, in rank order, and copied: all buffers have the same bits. 16-bit floats are added in
    float32 and rounded once.

    Args:
        transport: The ranks of this host.
        buffers: All ranks' flat buffers in rank order, equally long, changed in place. Every rank has finished writing
            its own buffer before any rank calls; the roll call guarantees that.
        reduction: The operation and its scaling.
        lent: This rank's addends that lie elsewhere in host memory, by their start in this rank's part. No other rank
            reads that part, so the addends need not be copied. The mapping is read at each call.
    """
    rank = transport.rank
    pieces = same_part(buffers, transport.size, rank)
    blocks = [(block, anothers_first(block, rank)) for block in in_blocks(pieces, reduction)]
    add_up, crossing = adder(pieces, reduction), crossing_bytes(buffers[rank], pieces[rank], transport.size)

    def two_shot() -> None:
        transport.tally.in_memory(crossing)
        if lent:
            add_up_lent(pieces, rank, reduction, lent, add_up)
        else:
            for addends, targets in blocks:
                add_up(addends, targets)
        transport.barrier()  # without it a rank would read or change its buffer while others still write into it

    return two_shot


def crossing_bytes(buffer: Array, part: Array, ranks: int) -> int:
    """The bytes that others read from this rank's buffer, and that this rank writes to theirs, in one two-shot.

    Others read all but its part, and this rank writes its part to each other buffer: 2n(p-1)/p bytes for equal parts.

    Args:
        buffer: This rank's buffer.
        part: The part that this rank adds up; empty if it adds nothing.
        ranks: The number of ranks on this host.
    """
    return int(buffer.nbytes - part.nbytes + (ranks - 1) * part.nbytes)


def add_up_lent(
    pieces: Sequence[Array], rank: int, reduction: Reduction, lent: Mapping[int, Array], add_up: AddUp
) -> None:
    """Add up these pieces, one of each rank. Use this rank's lent addends instead of its piece, where there are any."""

    def add_up_not_lent(start: int, stop: int | None) -> None:
        for block in in_blocks([piece[start:stop] for piece in pieces], reduction):
            add_up(block, anothers_first(block, rank))

    done = 0
    for start in sorted(lent):
        stop = start + lent[start].size
        add_up_not_lent(done, start)
        for addend, *targets in in_blocks([lent[start], *(piece[start:stop] for piece in pieces)], reduction):
            add_up([*targets[:rank], addend, *targets[rank + 1 :]], anothers_first(targets, rank))
        done = stop
    add_up_not_lent(done, None)


def anothers_first(block: Sequence[Array], rank: int) -> Sequence[Array]:
    """The same pieces as targets, with another rank's piece first.

    If cores are far apart, a core writes another core's cache line faster just after it has read it (MEASURED.md,
    "Details").
    """
    return block if rank else [*block[1:2], block[0], *block[2:]]


def in_blocks(pieces: Sequence[Array], reduction: Reduction) -> Iterator[tuple[Array, ...]]:
    """Equally long flat pieces, BLOCK_BYTES of each at a time. Short pieces that are added in place stay whole."""
    first = pieces[0]
    short = first.nbytes <= WHOLE_BYTES and len(pieces) * first.nbytes <= 4 * WHOLE_BYTES and in_place(first, reduction)
    return in_cache(*pieces, step=first.size if short else BLOCK_BYTES // first.itemsize)


def in_place(like: Array, reduction: Reduction) -> bool:
    """Whether arrays of like's dtype are added without wider copies."""
    return reduction.before == 1.0 and accumulator(like.dtype) == like.dtype


def adder(like: Sequence[Array], reduction: Reduction) -> AddUp:
    """A function that adds up blocks of these pieces."""
    first, before = like[0], reduction.before
    if fused.possible(like, reduction.operation):
        scales = scaling(reduction.after, reduction.divisor)
        return lambda addends, targets: fused.add_up(addends, len(targets), before, scales)
    if in_place(first, reduction):
        return adder_in_place(reduction, first)
    return adder_aside(reduction, widened(first[:0]))


def adder_in_place(reduction: Reduction, like: Array) -> AddUp:
    """An `AddUp` that sums in the first target.

    If the scaling is one product, it is computed for each target, because NumPy multiplies faster than it multiplies
    once and copies.
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
    """An `AddUp` that sums in a new array of wide's dtype, and rounds once."""
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
