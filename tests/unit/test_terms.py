"""What the arithmetic that a user asks for is made of."""

from __future__ import annotations

from hvdlite.ops import Average, Sum
from hvdlite.terms import Terms


def test_the_division_comes_before_the_sum() -> None:
    """So that sums of half-precision gradients do not overflow."""
    how = Terms(Average, 4).reduction(8)
    assert (how.operation, how.before, how.after, how.divisor) == ("sum", 0.25, 4.0, 8)
    assert Terms(Sum).reduction(8).divisor == 1
