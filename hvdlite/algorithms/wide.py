"""Reductions in a wider dtype: an array is widened, reduced and scaled there, and rounded once.

    int8 [100, -7]  ->  int64 [100, -7]  ->  sum over 2 ranks [200, -14]  ->  average, int8 [100, -7]

So partial sums that travel between ranks do not overflow, and are not rounded. Price: the messages carry the wider
dtype, at most MOST_ELEMENTS at a time.

    dtype                            is added as
    float16, bfloat16                float32
    scaled integers of 8 to 32 bits  int64
    scaled sums of int64, uint64     two of the same dtype: quotient and remainder by the number of ranks

Other integers are not widened. If a ring is chosen for 16-bit floats, `direct` replaces it. `direct`, Adasum and the
reductions in shared memory add these floats in float32 without this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hvdlite.algorithms.reduction import Reduction, assign, widened
from hvdlite.arrays import Array, DType, is_small_float, module

MOST_ELEMENTS = 4 << 20
"""Elements widened at a time: 16 MiB of float32, or 64 MiB of quotients and remainders."""


class Widening(Protocol):
    """A way to reduce arrays of one dtype in a wider one."""

    @property
    def reduction(self) -> Reduction:
        """The reduction of the original arrays."""
        ...

    def widen(self, array: Array) -> Array:
        """A new array of the prescaled numbers, in array's shape or with one more dimension at its end."""
        ...

    def narrow(self, wide: Array, array: Array) -> None:
        """Write the result into the array. wide: the unscaled reduction of all ranks' widened arrays."""
        ...


@dataclass(frozen=True)
class Cast:
    """A widening to one number of a wider dtype."""

    reduction: Reduction

    def widen(self, array: Array) -> Array:
        flat = array.reshape(-1)
        wide = widened(flat) if is_small_float(array.dtype) else flat.astype(np.int64)
        self.reduction.prescale(wide)
        return wide.reshape(array.shape)

    def narrow(self, wide: Array, array: Array) -> None:
        flat = wide.reshape(-1)
        self.reduction.postscale(flat)
        assign(array.reshape(-1), flat)


@dataclass(frozen=True)
class Split:
    """A widening of each number x to the pair (x // p, x % p), for p ranks.

    The sum of p quotients fits the dtype, and so does the sum of p remainders. Prescaled numbers must fit the dtype.
    """

    reduction: Reduction
    ranks: int

    def widen(self, array: Array) -> Array:
        numbers, whole = array.copy(), array.dtype.type(self.ranks)
        self.reduction.prescale(numbers)
        quotient = numbers // whole
        wide: Array = module(array).empty((*array.shape, 2), array.dtype)
        wide[..., 0] = quotient
        wide[..., 1] = numbers - quotient * whole
        return wide

    def narrow(self, wide: Array, array: Array) -> None:
        quotients, remainders, how = wide[..., 0], wide[..., 1], self.reduction
        whole = array.dtype.type(self.ranks)
        if how.after == 1.0 and how.divisor == self.ranks:
            quotient = quotients + remainders // whole  # rounded down; the next line rounds toward zero
            negative = module(array).less(quotient, 0)
            array[...] = quotient + (negative & (remainders % whole != 0))
        elif how.after == how.divisor == 1:
            array[...] = quotients * whole + remainders
        else:
            total = quotients.astype(np.float64) * float(self.ranks) + remainders.astype(np.float64)
            array[...] = module(array).trunc(total * how.after / how.divisor)


def of_integers(reduction: Reduction, dtype: DType, ranks: int) -> Widening | None:
    """The widening of integers that are scaled; None for other dtypes, and if integers wrap around as in NumPy."""
    if dtype.kind not in "iu" or not reduction.scales or reduction.operation == "adasum":
        return None
    if dtype.itemsize < 8:
        return Cast(reduction)
    return Split(reduction, ranks) if reduction.operation == "sum" else None


def widening(reduction: Reduction, dtype: DType, ranks: int) -> Widening | None:
    """The widening of arrays of this dtype, if partial results travel between ranks; None if they need none."""
    return Cast(reduction) if is_small_float(dtype) else of_integers(reduction, dtype, ranks)


def reduce(how: Widening, array: Array, allreduce: Callable[[Array, Reduction], None]) -> None:
    """Reduce a flat array in place, in a wider dtype. allreduce: reduces a flat wide array over the ranks, in place."""
    for start in range(0, array.size, MOST_ELEMENTS):
        piece = array[start : start + MOST_ELEMENTS]
        wide = how.widen(piece)
        allreduce(wide.reshape(-1), how.reduction.plain)
        how.narrow(wide, piece)
