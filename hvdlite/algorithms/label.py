"""Labels: an array's dtype and shape as a message of fixed length. A receiver gets it first, to allocate the array."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.arrays import Array, DType, bfloat16
from hvdlite.transports import Transport

MOST_DIMENSIONS = 64  # NumPy's limit
HEAD = 3
DTYPES = (*(np.dtype(letter) for letter in "?bhiqBHIQefdFD"), bfloat16)


def require_known(dtype: DType) -> None:
    """Raise ValueError for a dtype that receivers do not know."""
    if dtype not in DTYPES:
        raise ValueError(f"arrays of dtype {dtype} cannot be sent: convert them to a numeric dtype")


def encode(shape: Sequence[int], dtype: DType, note: int = 0) -> Array:
    """The label of an array. note: any number for the receiver. Raises ValueError as `require_known` does."""
    require_known(dtype)
    label = np.zeros(HEAD + MOST_DIMENSIONS, np.int64)
    label[:HEAD] = DTYPES.index(dtype), note, len(shape)
    label[HEAD : HEAD + len(shape)] = shape
    return label


def decode(label: Array) -> tuple[tuple[int, ...], DType, int]:
    """The shape, dtype and note of a label."""
    code, note, dimensions = (int(number) for number in label[:HEAD])
    return tuple(int(length) for length in label[HEAD : HEAD + dimensions]), DTYPES[code], note


def receive(transport: Transport, source: int) -> tuple[Array, int]:
    """Receive a label from `source`, then the array. Returns the array and the label's note."""
    label = np.empty(HEAD + MOST_DIMENSIONS, np.int64)
    transport.receive(label, source)
    shape, dtype, note = decode(label)
    array = np.empty(shape, dtype)
    transport.receive(array, source)
    return array, note
