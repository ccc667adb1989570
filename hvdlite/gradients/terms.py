"""The arithmetic that a user asks for: the operation over ranks, and the factor before the sum.

`Terms` is a part of `Settings`. The reducer takes `Terms.reduction` and gives it to every bucket. A new operation over
ranks begins here. `passes_of` checks the number of backward passes per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hvdlite import ops
from hvdlite.algorithms.reduction import Reduction
from hvdlite.ops import Average, Op


@dataclass(frozen=True)
class Terms:
    """An operation over ranks. Frozen, hashable, and compared between ranks.

    Attributes:
        op: The operation.
        predivide: Gradients are divided by this number before the sum, and multiplied by it after the sum.

    Raises:
        ValueError: `predivide` is no finite number above 0, or is not 1 and the operation is not Average.
    """

    op: Op = Average
    predivide: float = 1.0

    def __post_init__(self) -> None:
        try:
            predivide = float(self.predivide)
        except (TypeError, ValueError):
            predivide = 0.0
        if not 0 < predivide < float("inf"):
            raise ValueError(f"gradient_predivide_factor must be a number above 0, not {self.predivide!r}")
        object.__setattr__(self, "predivide", predivide)
        if self.predivide != 1.0 and self.op is not Average:
            raise ValueError(
                f"gradient_predivide_factor={self.predivide:g} is for op=hvd.Average only: leave it out for "
                f"op=hvd.{self.op.name}"
            )

    def __str__(self) -> str:
        """The terms in a user's words."""
        return f"op={self.op.name}" + (f", predivided by {self.predivide:g}" if self.predivide != 1.0 else "")

    def reduction(self, size: int) -> Reduction:
        """The arithmetic over `size` ranks."""
        return ops.reduction(self.op, size, 1.0 / self.predivide, self.predivide)


def passes_of(given: int) -> int:
    """Check backward_passes_per_step. Raises ValueError unless it is a whole number of at least 1."""
    if not isinstance(given, (int, np.integer)) or given < 1:
        raise ValueError(f"backward_passes_per_step must be a whole number, at least 1, not {given!r}")
    return int(given)
