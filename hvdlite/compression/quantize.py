"""Sums over hosts in few bits per element: `Int8` (8 or 4 bits, stochastic rounding) and `OneBit` (signs).

Both divide the elements into blocks, and each block into one scale and small codes. One exchange serves both. It is a
reduce-scatter and an all-gather of codes, for h hosts:

    this host's values     [ chunk 0 | chunk 1 | ... | chunk h-1 ]     whole blocks, padded with zeros
      encode               codes and scales of every chunk
      all-to-all           host b gets chunk b of all hosts
      decode, add          host b adds up its chunk, in host order; its own values are exact
      encode               host b encodes the sum
      all-gather           all hosts decode the same bytes, so they have the same bits

A host was understood to contribute what its codes say. The owner of a chunk also contributes what the second encoding
changed. So all contributions add up to the result.

Price: with n elements in blocks of k, a chunk has b = ceil(ceil(n/k)/h) blocks. Each driver sends 2(h-1) b (c + s)
bytes. c is the bytes of a block's codes, s those of its scale, which has the part's dtype: 4 or 8.

    Int8, 8 bits    c = k       float32, k = 256:   about 2.03 n(h-1)/h bytes; exact sums need 8
    Int8, 4 bits    c = k/2                         about 1.03
    OneBit          c = k/8     float32, k = 512:   about 0.27

An exchange keeps memory for the part's values once, and for twice the codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hvdlite.algorithms.movement import allgather, alltoall
from hvdlite.arrays import Array, DType
from hvdlite.compression import Column, MatrixCompressor, Piece, RoundMemory

Floats: TypeAlias = NDArray[np.float32]
"""float32 or float64."""
Bytes: TypeAlias = NDArray[np.uint8]

TILE = 64 * 1024
"""Elements that are encoded at once, so that all passes but the first find them in the cache."""
SIGNS = 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1) - 1
"""For each byte the 8 signs that it stands for."""


class Code(Protocol):
    """A code of blocks. Decoding depends on the bytes alone, and has the same bits on all hosts.

    Attributes:
        block: The elements of a block.
        width: The bytes of a block's codes.
    """

    @property
    def block(self) -> int: ...
    @property
    def width(self) -> int: ...

    def encode(self, rows: Floats, counts: Floats, codes: Bytes, random: np.random.SFC64) -> Floats:
        """Encode blocks.

        Args:
            rows: The blocks, one in each row. Overwritten: a scratch memory afterwards.
            counts: The elements of each block that are not padding, at least 1.
            codes: Filled with `width` bytes for each block.
            random: The source of random numbers.

        Returns:
            The blocks' scales.
        """
        ...

    def decode(self, codes: Bytes, scales: Floats, rows: Floats) -> None:
        """Fill the rows with decoded blocks."""
        ...


@dataclass(frozen=True, repr=False)
class Int8(MatrixCompressor):
    """Integers of 8 or 4 bits, by stochastic rounding: QSGD, Alistarh et al. 2017, arXiv:1610.02132.

    In a block with the largest magnitude m, an element x becomes one of the two integers next to 127 x / m (7 x / m for
    4 bits). It becomes the upper one with the probability that makes the mean right, up to 2^-16 of a step. So without
    error feedback the sums are unbiased. A restart from a checkpoint draws the same random numbers.

    Price: about 2 (bits/8 + 4/block) n(h-1)/h bytes per driver for n float32 elements on h hosts; exactly, see above.

    Args:
        bits: 8 or 4.
        block: The elements per scale, a multiple of 8.
        seed: The seed of the random numbers, at least 0.
        error_feedback: Whether what was not sent is added to the next round's gradients.

    Raises:
        ValueError: An argument is out of range.
    """

    bits: int = 8
    block: int = 256
    seed: int = 0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        if self.bits not in (8, 4):
            raise ValueError(f"int8 compression has 8 or 4 bits, not bits={self.bits!r}")
        check_block("int8", self.block)
        if self.seed < 0:
            raise ValueError(f"the seed of int8 compression must be at least 0, not seed={self.seed!r}")

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> TwoStages:
        """See `Compressor.prepare`."""
        return TwoStages(Integers(self.bits, self.block), column, pieces, dtype, self.seed)


@dataclass(frozen=True, repr=False)
class OneBit(MatrixCompressor):
    """One bit per element: its sign, and a block's mean magnitude.

    1-bit SGD, Seide et al. 2014, with the scale of Karimireddy et al. 2019, arXiv:1901.09847. The sums are biased, so
    that error feedback is always on.

    Price: about 2 (1/8 + 4/block) n(h-1)/h bytes per driver for n float32 elements on h hosts; exactly, see above.

    Args:
        block: The elements per scale, a multiple of 8.

    Raises:
        ValueError: An argument is out of range.
    """

    block: int = 512
    error_feedback: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_block("onebit", self.block)

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> TwoStages:
        """See `Compressor.prepare`."""
        return TwoStages(Signs(self.block), column, pieces, dtype, seed=0)


def check_block(name: str, block: int) -> None:
    """Raise ValueError if a block cannot have this length."""
    if block < 8 or block % 8:
        raise ValueError(f"the block of {name} compression must be a positive multiple of 8, not block={block!r}")


@dataclass(frozen=True)
class Integers:
    """The code of `Int8`: integers from -127 to 127, or two from -7 to 7 per byte. The scale is the step between them.

    The step is no smaller than the smallest normal number. So blocks of zeros and of denormals need no special case.
    """

    bits: int
    block: int

    @property
    def width(self) -> int:
        return self.block * self.bits // 8

    def encode(self, rows: Floats, counts: Floats, codes: Bytes, random: np.random.SFC64) -> Floats:
        """See `Code`. A step is 1e-5 longer than it need be: no rounding error leads to 128."""
        steps: Floats = np.abs(rows).max(axis=1)
        steps *= steps.dtype.type(1.00001 / (2 ** (self.bits - 1) - 1))
        np.maximum(steps, np.finfo(steps.dtype).tiny, out=steps)
        rows *= (1 / steps)[:, None]
        draws = random.random_raw(rows.size // 4).view(np.uint16).astype(rows.dtype).reshape(rows.shape)
        draws *= rows.dtype.type(2.0**-16)
        rows += draws
        np.floor(rows, out=rows)
        if self.bits == 8:
            codes.view(np.int8)[...] = rows
        else:
            rows += 8
            half = self.block // 2
            codes[...] = rows[:, :half] * 16 + rows[:, half:]
        return steps

    def decode(self, codes: Bytes, scales: Floats, rows: Floats) -> None:
        """See `Code`."""
        if self.bits == 8:
            np.multiply(codes.view(np.int8), scales[:, None], out=rows)
        else:
            half = self.block // 2
            rows[:, :half] = codes >> 4
            rows[:, half:] = codes & 15
            rows -= 8
            rows *= scales[:, None]


@dataclass(frozen=True)
class Signs:
    """The code of `OneBit`: a bit for each element that is not negative. The scale is the mean magnitude."""

    block: int

    @property
    def width(self) -> int:
        return self.block // 8

    def encode(self, rows: Floats, counts: Floats, codes: Bytes, random: np.random.SFC64) -> Floats:
        """See `Code`. Magnitudes are divided first, so that no sum overflows."""
        codes[...] = np.packbits(rows >= 0, axis=1)
        np.abs(rows, out=rows)
        rows /= counts[:, None]
        scales: Floats = rows.sum(axis=1)
        return scales

    def decode(self, codes: Bytes, scales: Floats, rows: Floats) -> None:
        """See `Code`."""
        np.take(SIGNS.astype(rows.dtype), codes.reshape(-1), axis=0, out=rows.reshape(-1, 8), mode="clip")
        rows *= scales[:, None]


class TwoStages:
    """The exchange of `Int8` and `OneBit`.

    Attributes:
        code: The code.
        column: One driver of each host.
        pieces: The parameters in the part.
        length: The number of elements in all pieces.
        values: Memory for the elements of all pieces without gaps, in blocks; indices: chunk, block, element.
        counts: For each block the elements that are not padding, at least 1; indices: chunk, block.
        outgoing: For each host the scales and codes of its chunk, as bytes.
        incoming: From each host the scales and codes of this host's chunk; then those of all sums.
        tiles: The blocks of a chunk in slices that are encoded at once.
        seed: What random numbers depend on, apart from the host and the round.
    """

    def __init__(self, code: Code, column: Column, pieces: Sequence[Piece], dtype: DType, seed: int) -> None:
        self.code, self.column, self.pieces = code, column, pieces
        self.length = sum(piece.length for piece in pieces)
        blocks = -(-self.length // (code.block * column.size))  # of a chunk, rounded up
        self.values: Floats = np.empty((column.size, blocks, code.block), dtype)
        starts = np.arange(column.size * blocks).reshape(column.size, blocks) * code.block
        self.counts: Floats = np.clip(self.length - starts, 1, code.block).astype(dtype)
        self.outgoing: Bytes = np.zeros((column.size, blocks * (dtype.itemsize + code.width)), np.uint8)
        self.incoming: Bytes = np.empty_like(self.outgoing)
        step = max(TILE // code.block, 1)
        self.tiles = [slice(start, start + step) for start in range(0, blocks, step)]
        self.seed = seed, crc32(repr([(piece.name, piece.first) for piece in pieces]).encode())

    def __call__(self, values: Array, sent: Array, now: RoundMemory) -> None:
        """See `Exchange`."""
        column, here = self.column, self.column.rank
        if column.size == 1:
            sent[...] = values
            return
        random = np.random.SFC64([*self.seed, now.number, here])
        self.load(values)
        for host in range(column.size):
            if host != here:
                codes, scales = self.unpacked(self.outgoing[host])
                for tile in self.tiles:
                    self.encode(self.values[host, tile], self.counts[host, tile], (codes[tile], scales[tile]), random)
        alltoall(column.transport, [*self.outgoing], [*self.incoming])
        self.add_up(random)
        sent[...] = 0
        self.store(sent)
        allgather(column.transport, [*self.incoming])
        for host in range(column.size):
            codes, scales = self.unpacked(self.incoming[host])
            for tile in self.tiles:
                self.code.decode(codes[tile], scales[tile], self.values[host, tile])
        self.store(values)

    def load(self, part: Array) -> None:
        """Copy the pieces' elements into `self.values`, and pad them with zeros."""
        flat, place = self.values.reshape(-1), 0
        for piece in self.pieces:
            flat[place : place + piece.length] = part[piece.here]
            place += piece.length
        flat[place:] = 0

    def store(self, part: Array) -> None:
        """Copy `self.values` to the pieces' elements."""
        flat, place = self.values.reshape(-1), 0
        for piece in self.pieces:
            part[piece.here] = flat[place : place + piece.length]
            place += piece.length

    def add_up(self, random: np.random.SFC64) -> None:
        """Add up this host's chunk, and encode the sums. `values` gets what the encoding has changed, too."""
        here, received = self.column.rank, [self.unpacked(row) for row in self.incoming]
        left = self.length - here * self.values[here].size
        for tile in self.tiles:
            mine = self.values[here, tile]
            sums, rows = mine.copy(), np.empty_like(mine)
            for host, (codes, scales) in enumerate(received):
                if host != here:
                    self.code.decode(codes[tile], scales[tile], rows)
                    sums += rows
            sums.reshape(-1)[max(left - tile.start * self.code.block, 0) :] = 0  # decoded padding need not be zero
            mine -= sums
            codes, scales = received[here]
            self.encode(sums, self.counts[here, tile], (codes[tile], scales[tile]), random)
            mine += sums

    def encode(self, rows: Floats, counts: Floats, packed: tuple[Bytes, Floats], random: np.random.SFC64) -> None:
        """Encode blocks to codes and scales. The blocks become what the code says."""
        codes, scales = packed
        scales[...] = self.code.encode(rows, counts, codes, random)
        self.code.decode(codes, scales, rows)

    def unpacked(self, packed: Bytes) -> tuple[Bytes, Floats]:
        """Views of the codes, one row per block, and of the scales. In the bytes, the scales come first."""
        blocks = self.values.shape[1]
        codes = packed[packed.size - blocks * self.code.width :].reshape(blocks, self.code.width)
        return codes, packed[: packed.size - codes.size].view(self.values.dtype)
