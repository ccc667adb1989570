"""`RandomK`: the same random elements on all hosts, so that no indices travel (Stich et al. 2018, arXiv:1809.07599)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.arrays import Array, DType, module
from hvdlite.compression import Column, MatrixCompressor, Piece, RoundMemory
from hvdlite.compression.selection import Selection, check_ratio


@dataclass(frozen=True, repr=False)
class RandomK(MatrixCompressor):
    """Sends k = ratio n random elements of each part with n elements. All elements are equally likely.

    For h hosts and float32 each driver sends 8k(h-1)/h bytes, those of an all-reduce of k elements.

    Args:
        ratio: The share of the elements to send.
        seed: Another seed gives other elements.
        error_feedback: Whether what was not sent is added to the next round's gradients. If not, values are multiplied
            by n/k, so that the sum is right on average.

    Raises:
        ValueError: An argument is out of its range.
    """

    ratio: float = 0.01
    seed: int = 0
    error_feedback: bool = True

    def __post_init__(self) -> None:
        check_ratio(self.ratio)
        if self.seed != int(self.seed) or self.seed < 0:
            raise ValueError(f"seed is a whole number, at least 0, not {self.seed}")

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> Drawn:
        """The exchange. See `Compressor`."""
        count = Selection.of(pieces, length, self.ratio).count(0)
        return Drawn(column, tuple(pieces), count, self.seed, scaled=not self.error_feedback)


@dataclass(frozen=True)
class Drawn:
    """The exchange of random elements.

    Attributes:
        column: One driver of each host.
        pieces: The parameters in the part.
        count: The number of elements to draw.
        seed: The user's seed.
        scaled: Whether values are multiplied, so that the result is right on average.
    """

    column: Column
    pieces: tuple[Piece, ...]
    count: int
    seed: int
    scaled: bool

    def __call__(self, values: Array, sent: Array, now: RoundMemory) -> None:
        """See `Exchange`."""
        places = module(values).asarray(self.places(now.number))
        picked = values[places]
        if self.scaled:
            picked *= sum(piece.length for piece in self.pieces) / max(self.count, 1)
        sent[...] = 0
        sent[places] = picked
        self.column.sum(picked)
        values[...] = 0
        values[places] = picked

    def places(self, number: int) -> Array:
        """The random places of a round, in the part. All hosts draw the same.

        The pieces' elements are laid out in a circle, and the circle is cut at a random place into `count` blocks. Each
        block gives one random element. Blocks differ in length by at most 1, but each element is in each place of
        the cut circle equally often, so that all are equally likely. This takes about 30 ns per element.
        """
        ends = np.cumsum([piece.length for piece in self.pieces], dtype=np.int64)
        if not self.count:
            return ends[:0]
        elements = int(ends[-1])
        names = "\n".join(f"{piece.name} {piece.first}" for piece in self.pieces)
        random = np.random.default_rng((self.seed, number, zlib.crc32(names.encode())))
        bounds = np.arange(self.count + 1) * elements // self.count
        chosen = bounds[:-1] + (random.random(self.count) * np.diff(bounds)).astype(np.int64)
        chosen = (chosen + random.integers(elements)) % elements
        shifts = np.array([piece.start + piece.length for piece in self.pieces]) - ends
        places: Array = chosen + shifts[np.searchsorted(ends, chosen, side="right")]
        return places
