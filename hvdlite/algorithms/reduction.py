"""The arithmetic of a reduction: the operation, its precision, and the scaling around it.

    result = reduce(input * before) * after / divisor

float16 and bfloat16 are added in float32. Averages of integers are exact: the sum is divided by the number of ranks and
truncated toward zero. (Horovod multiplies by 1/size in double, so 49/49 becomes 0.) Partial sums that travel between
ranks have a wider dtype (`wide`) for 16-bit floats and for integers that are scaled. Integers without scaling keep
their dtype and wrap around. The hierarchical algorithm rounds each host's 16-bit sum to 16 bits. float32 and float64
are added first and divided once, so a sum above the largest number is infinite. Rejected: to divide first, as DDP does,
because that rounds every rank's number and needs another pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hvdlite.algorithms import fused, half
from hvdlite.arrays import LINE, LONG, Array, DType, accumulator, is_float, is_host, is_small_float, module

FUNCTIONS = {
    "sum": "add", "min": "minimum", "max": "maximum", "product": "multiply",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor",
}  # fmt: skip
BOOLEAN_FUNCTIONS = {
    "sum": "logical_or", "min": "logical_and", "max": "logical_or", "product": "logical_and",
    "and": "logical_and", "or": "logical_or", "xor": "logical_xor",
}  # fmt: skip
WIDE_ELEMENTS = 64 * 1024

Scaler: TypeAlias = Callable[[Array], None]
"""Scales an array in place."""
Combiner: TypeAlias = Callable[[Array, Array], None]
"""Combines the first array with the second, in place."""


@dataclass(frozen=True)
class Reduction:
    """An operation and its scaling.

    Attributes:
        operation: A key of FUNCTIONS, or "adasum".
        before: A factor for each rank's input.
        after: A factor for the result.
        divisor: The result is divided by it: the number of ranks for an average, else 1.
    """

    operation: str = "sum"
    before: float = 1.0
    after: float = 1.0
    divisor: int = 1

    def __str__(self) -> str:
        """The reduction in messages to users, such as "average, prescale 0.5"."""
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
        """The function of like's module that combines two arrays of like's dtype into a third one, `out`."""
        names = BOOLEAN_FUNCTIONS if like.dtype.kind == "b" else FUNCTIONS
        found = getattr(module(like), names[self.operation])
        if found in (np.minimum, np.maximum):  # these take the third array only as a keyword
            return lambda mine, theirs, out: found(mine, theirs, out=out)
        return found

    def combine(self, total: Array, other: Array) -> None:
        """Set total = total (op) other, in place. NaN in either gives NaN.

        If other is a 16-bit float, total is float32, and other is prescaled first.
        """
        self.combiner(other)(total, other)

    def combiner(self, like: Array) -> Combiner:
        """A function that does `combine` for arrays of this dtype and module."""
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
        """A function that does `combine` with these arrays, for many calls."""
        if is_small_float(other.dtype):
            return partial(self.combiner(other), total, other)
        return partial(combine_all, self.function(total), along_lines(total, other))

    def prescale(self, array: Array) -> None:
        """Apply `before`, in place."""
        self.prescaler(array)(array)

    def prescaler(self, like: Array) -> Scaler:
        """A function that does `prescale` for arrays of this dtype and module."""
        return scaler(like, self.before, 1)

    def postscale(self, array: Array) -> None:
        """Apply `after` and `divisor`, in place. The rank that finished an element's sum calls it once."""
        self.postscaler(array)(array)

    def postscaler(self, like: Array) -> Scaler:
        """A function that does `postscale` for arrays of this dtype and module."""
        return scaler(like, self.after, self.divisor)

    def factor(self, like: Array) -> Any:
        """The factor of `postscale`, if it only multiplies arrays of this dtype; else None."""
        usual = like.dtype.kind == "f" and not is_small_float(like.dtype)
        steps = factors(like, like.dtype, self.after, self.divisor) if usual else []
        return steps[0][1] if [function for function, _ in steps] == [module(like).multiply] else None


def combine_all(function: Any, pairs: Sequence[tuple[Array, Array]]) -> None:
    """Combine each pair's first array with its second, in place."""
    for mine, theirs in pairs:
        function(mine, theirs, mine)


def along_lines(total: Array, other: Array) -> list[tuple[Array, Array]]:
    """Cut long arrays on the host in two, at the begin of total's first whole cache line.

    NumPy writes vectors. If the array were not cut, each vector would lie across two lines (MEASURED.md, "Details").
    """
    if is_host(total) and total.nbytes >= LONG and (ahead := -total.ctypes.data % LINE // total.itemsize):
        return [(total[:ahead], other[:ahead]), (total[ahead:], other[ahead:])]
    return [(total, other)]


def scaler(like: Array, factor: float, divisor: int) -> Scaler:
    """A function that sets array = array * factor / divisor, in place, for like's dtype and module.

    Integers are scaled in float64 and truncated. If factor is 1, their division is exact.
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
    """`scaler` for floats of 32 and 64 bits, and for complex numbers."""
    parts = like.dtype.kind == "c"  # scale both parts: infinity times a complex number would give NaN
    kind = np.dtype(f"f{like.dtype.itemsize // 2}") if parts else like.dtype
    steps = factors(like, kind, factor, divisor)

    def scale(array: Array) -> None:
        array = array.view(kind) if parts else array
        for function, value in steps:
            function(array, value, array)

    return scale


def factors(like: Array, kind: DType, factor: float, divisor: int) -> list[tuple[Any, Any]]:
    """Functions of like's module that scale an array of dtype `kind` one after another, each with its second argument.

    On the host that argument is an array without dimensions: NumPy is faster with it than with a number (MEASURED.md,
    "Details").
    """
    xp = module(like)
    functions, number = {"*": xp.multiply, "/": xp.divide}, np.array if is_host(like) else kind.type
    return [(functions[sign], number(kind.type(value))) for sign, value in scaling(factor, divisor)]


def widened(array: Array) -> Array:
    """A new array of the same numbers, of the dtype `accumulator`."""
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
    """Equally long flat arrays, `step` elements at a time. On a GPU they stay whole, since each step costs kernels.

    By default a step is so short that wider copies stay in the cache.
    """
    size = arrays[0].size
    step = step if is_host(arrays[0]) else size
    for start in range(0, size, max(step, 1)):
        yield tuple(array[start : start + step] for array in arrays)


def scaling(factor: float, divisor: int) -> fused.Scaling:
    """The steps that scale floats of 32 and 64 bits by factor / divisor."""
    if factor == 1.0 and divisor == 1:
        return ()
    if divisor & (divisor - 1) == 0:  # to multiply by its inverse is as exact, and faster
        return (("*", factor / divisor),)
    return (*((("*", factor),) if factor != 1.0 else ()), ("/", float(divisor)))


def scaled_integers(array: Array, factor: float, divisor: int) -> Any:
    """array * factor / divisor as a new array, truncated."""
    xp = module(array)
    if factor != 1.0:
        return xp.trunc(array.astype(np.float64) * factor / divisor)
    whole = np.min_scalar_type(divisor).type(divisor)  # NumPy refuses an int that does not fit: 128 and int8
    quotient = array // whole
    # Floor division rounds down. Add 1 to negative quotients with a remainder, to round toward zero.
    return quotient + (xp.less(array, 0) & (quotient * whole != array))
