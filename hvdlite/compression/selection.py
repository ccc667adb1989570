"""The largest elements of a part of a bucket, and what else the sparsifying compressors have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.arrays import Array, module
from hvdlite.compression import Piece, gaps_between

FIRST_RATIO = 0.25
"""The ratio of the first round of a warm-up."""
STRIDE, LEAST_SAMPLED = 101, 32 * 1024
"""One element of STRIDE is looked at to guess a threshold, in arrays of at least LEAST_SAMPLED elements."""


@dataclass(frozen=True)
class Selection:
    """The choice of a part's largest elements in every round.

    Attributes:
        elements: The number of elements in the part's pieces.
        gaps: What lies between the pieces. It is never selected.
        ratio: The share of the elements that is selected after the warm-up.
        warmup_rounds: The length of the warm-up in rounds. In it the ratio falls exponentially from FIRST_RATIO (Lin
            et al. 2018, arXiv:1712.01887, section 3.3).
    """

    elements: int
    gaps: tuple[slice, ...]
    ratio: float
    warmup_rounds: int = 0

    @classmethod
    def of(cls, pieces: Sequence[Piece], length: int, ratio: float, warmup_rounds: int = 0) -> Selection:
        """The selection in a part of this length with these pieces."""
        return cls(sum(piece.length for piece in pieces), gaps_between(pieces, length), ratio, warmup_rounds)

    def count(self, number: int) -> int:
        """The number of elements to select in the round with this number: at least one, if there is any."""
        passed = min(1.0, number / self.warmup_rounds) if self.warmup_rounds else 1.0
        ratio = max(self.ratio, math.pow(FIRST_RATIO, 1 - passed) * math.pow(self.ratio, passed))
        return math.ceil(ratio * self.elements)

    def __call__(self, values: Array, scratch: Array, number: int) -> Array:
        """The places of the largest magnitudes in the pieces, ascending, as uint32. `scratch` is as `values`."""
        magnitudes = module(values).abs(values, out=scratch)
        for gap in self.gaps:
            magnitudes[gap] = -1  # below all magnitudes
        return largest(magnitudes, self.count(number))


def largest(magnitudes: Array, count: int) -> Array:
    """The places of the `count` largest of these numbers, ascending, as uint32.

    If few are wanted, a sample gives a threshold that the wanted ones exceed, with some more. Most often the search is
    then among these alone, which takes a half to an eighth of the time.
    """
    xp, size = module(magnitudes), len(magnitudes)
    if count >= size or count == 0:
        return xp.arange(count and size, dtype=xp.uint32)  # type: ignore[no-any-return]
    among = None
    if size >= LEAST_SAMPLED and 16 * count <= size:
        sample = magnitudes[::STRIDE]
        place = len(sample) - (2 * count // STRIDE + 16)
        above = xp.flatnonzero(magnitudes >= xp.partition(sample, place)[place])
        if len(above) >= count:
            among, magnitudes = above, magnitudes[above]
    found = xp.argpartition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count :]
    return xp.sort(found if among is None else among[found]).astype(xp.uint32)  # type: ignore[no-any-return]


def check_ratio(ratio: float) -> None:
    """Raise ValueError unless the ratio is above 0 and at most 1."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is the share of elements to send: above 0 and at most 1, not {ratio}")
