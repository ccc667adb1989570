"""The arithmetic of a reduction: which operation, in which precision, and the scaling around it.

float16 and bfloat16 are added in float32. Integers are scaled exactly: the sum is divided by the number of ranks
with truncation toward zero (Horovod multiplies by 1/size in double and truncates, which turns 49/49 into 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.arrays import Array, is_float, is_small_float, module

FUNCTIONS = {"sum": "add", "min": "minimum", "max": "maximum", "product": "multiply"}
BOOLEAN_FUNCTIONS = {"sum": "logical_or", "min": "logical_and", "max": "logical_or", "product": "logical_and"}


@dataclass(frozen=True)
class Reduction:
    """result = reduce(input * before) * after / divisor, with reduce one of FUNCTIONS (or "adasum", see there)."""

    operation: str = "sum"
    before: float = 1.0
    after: float = 1.0
    divisor: int = 1

    def combine(self, total: Array, other: Array) -> None:
        """total = total (op) other, in place; small floats in float32. NaN on either side gives NaN."""
        names = BOOLEAN_FUNCTIONS if total.dtype.kind == "b" else FUNCTIONS
        function = getattr(module(total), names[self.operation])
        if is_small_float(total.dtype):
            total[...] = function(total.astype(np.float32), other.astype(np.float32))
        else:
            function(total, other, out=total)

    def prescale(self, array: Array) -> None:
        """Apply `before`, in place."""
        if self.before != 1.0:
            scale(array, self.before, 1)

    def postscale(self, array: Array) -> None:
        """Apply `after` and `divisor`, in place. Called once per element, by the rank that finished its sum."""
        scale(array, self.after, self.divisor)


def scale(array: Array, factor: float, divisor: int) -> None:
    """array = array * factor / divisor, in place; integers in double (exactly when factor is 1), truncated."""
    if factor == 1.0 and divisor == 1:
        return
    xp = module(array)
    if not is_float(array.dtype):
        array[...] = scaled_integers(array, factor, divisor)
    elif is_small_float(array.dtype):
        array[...] = array.astype(np.float32) * np.float32(factor / divisor)
    elif divisor & (divisor - 1) == 0:  # dividing by a power of two is exact either way, and multiplying faster
        xp.multiply(array, array.dtype.type(factor / divisor), out=array)
    else:
        if factor != 1.0:
            xp.multiply(array, array.dtype.type(factor), out=array)
        xp.divide(array, array.dtype.type(divisor), out=array)


def scaled_integers(array: Array, factor: float, divisor: int) -> Any:
    xp = module(array)
    if factor != 1.0:
        return xp.trunc(array.astype(np.float64) * factor / divisor)
    quotient = array // divisor
    # Floor division rounds down; what was negative and not divisible goes back up, toward zero.
    return quotient + ((array < 0) & (quotient * divisor != array))


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype in which sums of `dtype` are computed."""
    return np.dtype(np.float32) if is_small_float(dtype) else dtype
