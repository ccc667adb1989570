"""The arithmetic of a reduction: the operation, its precision, and the scaling around it.

    result = reduce(input * before) * after / divisor

float16 and bfloat16 are added in float32. Averages of integers are exact: the sum is divided by the number of ranks and
truncated toward zero. (Horovod multiplies by 1/size in double, which turns 49/49 into 0.) If partial sums of integers
or 16-bit floats pass between ranks, they are wider (`wide`). float32 and float64 are added first and divided once: a
sum beyond their largest number is infinite. Rejected: to divide first, as DDP does, which rounds every rank's number
and needs another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hvdlite.algorithms import fused, half
from hvdlite.arrays import LINE, LONG, Array, DType, accumulator, is_float, is_host, is_small_float, module

FUNCTIONS = {"sum": "add", "min": "minimum", "max": "maximum", "product": "multiply"}
BOOLEAN_FUNCTIONS = {"sum": "logical_or", "min": "logical_and", "max": "logical_or", "product": "logical_and"}
WIDE_ELEMENTS = 64 * 1024

Scaler: TypeAlias = Callable[[Array], None]
"""Scales an array in place."""
Combiner: TypeAlias = Callable[[Array, Array], None]
"""Combines the first array with the second, in place."""


@dataclass(frozen=True)
class Reduction:
    """An operation of FUNCTIONS (or "adasum", see there), and its scaling."""

    operation: str = "sum"
    before: float = 1.0
    after: float = 1.0
    divisor: int = 1

    def __str__(self) -> str:
        """The name that users know it by."""
        named = (("prescale", self.before), ("postscale", self.after))
        factors = [f"{what} {factor:g}" for what, factor in named if factor != 1.0]
        return ", ".join(["average" if self.divisor > 1 else self.operation, *factors])

    @property
    def scales(self) -> bool:
        """Whether there is any scaling."""
        return self.before != 1.0 or self.after != 1.0 or self.divisor != 1

    @property
    def plain(self) -> Reduction:
        """The operation without scaling."""
        return Reduction(self.operation)

    def function(self, like: Array) -> Any:
        """The function for arrays of this kind, in like's module. It takes two arrays and `out`."""
        names = BOOLEAN_FUNCTIONS if like.dtype.kind == "b" else FUNCTIONS
        found = getattr(module(like), names[self.operation])
        if found in (np.minimum, np.maximum):  # they take a third array only by its name
            return lambda mine, theirs, out: found(mine, theirs, out=out)
        return found

    def combine(self, total: Array, other: Array) -> None:
        """total = total (op) other, in place. NaN on either side gives NaN.

        For 16-bit floats total is float32, and other is prescaled first.
        """
        self.combiner(other)(total, other)

    def combiner(self, like: Array) -> Combiner:
        """`combine` for arrays of this kind."""
        if not is_small_float(like.dtype):
            function = self.function(like)
            return lambda total, other: combine_all(function, along_lines(total, other))
        wide = widened(like[:0])
        add, prescale = self.function(wide), self.prescaler(wide)

        def combine(total: Array, other: Array) -> None:
            for mine, theirs in in_cache(total, other):
                addend = widened(theirs)
                prescale(addend)
                add(mine, addend, mine)

        return combine

    def prepared_combine(self, total: Array, other: Array) -> Callable[[], None]:
        """`combine` of these arrays, for many calls."""
        if is_small_float(other.dtype):
            return partial(self.combiner(other), total, other)
        return partial(combine_all, self.function(total), along_lines(total, other))

    def prescale(self, array: Array) -> None:
        """Apply `before`, in place."""
        self.prescaler(array)(array)

    def prescaler(self, like: Array) -> Scaler:
        """`prescale` for arrays of this kind."""
        return scaler(like, self.before, 1)

    def postscale(self, array: Array) -> None:
        """Apply `after` and `divisor`, in place. The rank that finished an element's sum calls it once."""
        self.postscaler(array)(array)

    def postscaler(self, like: Array) -> Scaler:
        """`postscale` for arrays of this kind."""
        return scaler(like, self.after, self.divisor)

    def factor(self, like: Array) -> Any:
        """What an array of this kind is multiplied by, where that is all that `postscale` does; else None."""
        usual = like.dtype.kind == "f" and not is_small_float(like.dtype)
        steps = factors(like, like.dtype, self.after, self.divisor) if usual else []
        return steps[0][1] if [function for function, _ in steps] == [module(like).multiply] else None


def combine_all(function: Any, pairs: Sequence[tuple[Array, Array]]) -> None:
    for mine, theirs in pairs:
        function(mine, theirs, mine)


def along_lines(total: Array, other: Array) -> list[tuple[Array, Array]]:
    """Cut long arrays on the host in two, where total's first whole cache line begins.

    NumPy writes whole vectors, which would otherwise lie across two lines each (MEASURED.md, "Details").
    """
    if is_host(total) and total.nbytes >= LONG and (ahead := -total.ctypes.data % LINE // total.itemsize):
        return [(total[:ahead], other[:ahead]), (total[ahead:], other[ahead:])]
    return [(total, other)]


def scaler(like: Array, factor: float, divisor: int) -> Scaler:
    """A function that does array = array * factor / divisor for like's dtype and module.

    Integers are scaled in double (exactly if factor is 1) and truncated.
    """
    if factor == 1.0 and divisor == 1:
        return lambda array: None
    if not is_float(like.dtype) and like.dtype.kind != "c":
        return lambda array: assign(array, scaled_integers(array, factor, divisor))
    if not is_small_float(like.dtype):
        return scaler_of_floats(like, factor, divisor)
    if fused.possible([like], "sum"):
        return lambda array: fused.add_up([array], targets=1, scaling=(("*", factor / divisor),))

    def scale(array: Array) -> None:
        for (part,) in in_cache(array):
            assign(part, widened(part) * np.float32(factor / divisor))

    return scale


def scaler_of_floats(like: Array, factor: float, divisor: int) -> Scaler:
    """The same for floats of 32 and 64 bits, and for complex numbers."""
    parts = like.dtype.kind == "c"  # infinity times a complex number gives a nan; scaling its parts gives none
    kind = np.dtype(f"f{like.dtype.itemsize // 2}") if parts else like.dtype
    steps = factors(like, kind, factor, divisor)

    def scale(array: Array) -> None:
        array = array.view(kind) if parts else array
        for function, value in steps:
            function(array, value, array)

    return scale


def factors(like: Array, kind: DType, factor: float, divisor: int) -> list[tuple[Any, Any]]:
    """Functions of like's module that scale arrays of this kind one after another, each with its argument.

    On the host the argument is an array without dimensions, which NumPy handles faster than a number (MEASURED.md,
    "Details").
    """
    xp = module(like)
    functions, number = {"*": xp.multiply, "/": xp.divide}, np.array if is_host(like) else kind.type
    return [(functions[sign], number(kind.type(value))) for sign, value in scaling(factor, divisor)]


def widened(array: Array) -> Array:
    """A new array of the same numbers, in the dtype in which they are added."""
    if array.dtype == np.float16 and is_host(array):
        return half.widened(array)
    return array.astype(accumulator(array.dtype))


def assign(array: Array, values: Array) -> None:
    """Write the values into the array, rounded."""
    if array.dtype == np.float16 and values.dtype == np.float32 and is_host(array):
        half.narrow(values, array)
    else:
        array[...] = values


def in_cache(*arrays: Array, step: int = WIDE_ELEMENTS) -> Iterator[tuple[Array, ...]]:
    """Equally long flat arrays, `step` elements at a time.

    By default so few that wider copies stay in the cache. On a GPU they stay whole, since each step costs kernels.
    """
    size = arrays[0].size
    step = step if is_host(arrays[0]) else size
    for start in range(0, size, max(step, 1)):
        yield tuple(array[start : start + step] for array in arrays)


def scaling(factor: float, divisor: int) -> fused.Scaling:
    """The steps that scale floats of 32 and 64 bits by factor / divisor."""
    if factor == 1.0 and divisor == 1:
        return ()
    if divisor & (divisor - 1) == 0:  # dividing by a power of two is exact either way, and multiplying faster
        return (("*", factor / divisor),)
    return (*((("*", factor),) if factor != 1.0 else ()), ("/", float(divisor)))


def scaled_integers(array: Array, factor: float, divisor: int) -> Any:
    xp = module(array)
    if factor != 1.0:
        return xp.trunc(array.astype(np.float64) * factor / divisor)
    whole = np.min_scalar_type(divisor).type(divisor)  # an int would have to fit array's dtype: 128 is no int8
    quotient = array // whole
    # Floor division rounds down; what was negative and not divisible goes back up, toward zero.
    return quotient + ((array < 0) & (quotient * whole != array))
