"""How a rank that has joined takes part in the all-reduces of the others: with zeros."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.algorithms import allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.engine import Lane


@dataclass(frozen=True)
class Zeros:
    """All-reduces of zeros of these lengths and dtypes, one after another, whose results nobody sees. Picklable."""

    lengths: tuple[tuple[int, np.dtype[Any]], ...]
    how: Reduction

    @classmethod
    def like(cls, arrays: Iterable[Array], how: Reduction) -> Zeros:
        return cls(tuple((array.size, array.dtype) for array in arrays), how)

    def __call__(self, lane: Lane) -> None:
        for length, dtype in self.lengths:
            allreduce(lane.transport, lane.workspace, lane.place, np.zeros(length, dtype), self.how)
