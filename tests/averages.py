"""Numbers with sums that overflow their dtype, and their averages by Python's arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.arrays import Array, bfloat16

FLOATS = [np.dtype(np.float16), bfloat16]
INTEGERS = [np.dtype(kind) for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")]


def given(size: int, length: int, dtype: np.dtype[Any]) -> list[Array]:
    """Random numbers of all magnitudes, among them the largest of the dtype, the least, and numbers near them.

    Other ranks' numbers are so near that float32 holds the sum exactly.
    """
    arrays: list[Array] = []
    powers = 2.0 ** np.random.default_rng(length).integers(-24, 5, length)
    for rank in range(size):
        rng = np.random.default_rng(1000 * rank + length)
        if dtype.kind in "iu":
            least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
            array = rng.integers(least, most, length, dtype=dtype, endpoint=True)
            array[0::7], array[1::7], array[2::7] = most, least, most - rank
        else:
            largest = float(np.finfo(np.float16).max)
            array = (rng.integers(-2047, 2048, length) * powers).astype(dtype)
            array[0::7], array[1::7], array[2::7] = largest, -largest, largest / 2 + 64 * rank
        arrays.append(array)
    return arrays


def average(arrays: Sequence[Array], divisor: int) -> Array:
    """The average in Python's integers, truncated toward zero; or in float64, rounded once."""
    dtype = arrays[0].dtype
    if dtype.kind not in "iu":
        return (sum(np.asarray(array, np.float64) for array in arrays) / divisor).astype(dtype)
    totals = [sum(map(int, numbers)) for numbers in zip(*arrays, strict=True)]
    return np.array([abs(total) // divisor * (1 if total > 0 else -1) for total in totals], dtype)
