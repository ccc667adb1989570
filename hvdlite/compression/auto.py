"""`Auto`: the user's wish for float32 or bfloat16 between hosts, whichever takes less time (`gradients/wire_trial`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvdlite.arrays import DType
from hvdlite.compression import Column, Exchange, MatrixCompressor, Piece


@dataclass(frozen=True, repr=False)
class Auto(MatrixCompressor):
    """All gradients take part. Nothing is kept from round to round, so it needs no exchange."""

    error_feedback: ClassVar[bool] = False

    def fits(self, shape: tuple[int, ...]) -> bool:
        """All shapes fit."""
        return True

    def prepare(self, column: Column, pieces: Sequence[Piece], length: int, dtype: DType) -> Exchange:
        """Never called: `gradients/wire_trial` makes the all-reduce."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "auto"
