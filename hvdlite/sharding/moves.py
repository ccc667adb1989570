"""Moves: which elements go from which old piece to which new one, if a parameter's cuts change.

old borders     0         4         8    10         three ranks
new borders     0              6         10         two ranks
moves           | 0 to 0  |0-1 |1-1 |2-1|
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Move:
    """Elements, from and to, of a parameter. source, target: the rank whose piece has them before and after."""

    source: int
    target: int
    start: int
    stop: int


def moves(old: Sequence[int], new: Sequence[int]) -> Iterator[Move]:
    """Yield the moves that fill the new pieces of a parameter from the old ones, in the order of elements. Pure.

    Args:
        old: The borders of the old pieces, as in `Cuts`.
        new: The borders of the new pieces, of any number of ranks. They end where the old ones end.
    """
    source, target, start = 0, 0, 0
    while start < old[-1]:
        while old[source + 1] <= start:
            source += 1
        while new[target + 1] <= start:
            target += 1
        stop = min(old[source + 1], new[target + 1])
        yield Move(source, target, start, stop)
        start = stop
