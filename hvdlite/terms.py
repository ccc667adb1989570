"""The arithmetic that a user asks for: how gradients become the ranks' average, or another result."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite import ops
from hvdlite.algorithms.reduction import Reduction
from hvdlite.ops import Average, Op


@dataclass(frozen=True)
class Terms:
    """op over ranks; gradients are divided by `predivide` before the sum and multiplied by it after.

    Raises ValueError for what cannot be right.
    """

    op: Op = Average
    predivide: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "predivide", float(self.predivide))
        if not self.predivide > 0:
            raise ValueError(f"gradient_predivide_factor must be above 0, not {self.predivide}")
        if self.predivide != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor is for op=Average only")

    def reduction(self, size: int) -> Reduction:
        """The arithmetic over this many ranks."""
        return ops.reduction(self.op, size, 1.0 / self.predivide, self.predivide)
