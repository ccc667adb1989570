"""What a receiver needs to know before it can take an array: its dtype and shape, as a message of fixed length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.arrays import Array, bfloat16
from hvdlite.transports import Transport

MOST_DIMENSIONS = 64  # NumPy's limit
DTYPES = (*(np.dtype(letter) for letter in "?bhiqBHIQefdFD"), bfloat16)


def encode(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """Raises ValueError for dtypes that other processes would not know."""
    if dtype not in DTYPES:
        raise ValueError(f"arrays of dtype {dtype} cannot be sent: the receiver would not know it")
    label = np.zeros(2 + MOST_DIMENSIONS, np.int64)
    label[:2] = DTYPES.index(dtype), len(shape)
    label[2 : 2 + len(shape)] = shape
    return label


def decode(label: Array) -> tuple[tuple[int, ...], np.dtype[Any]]:
    return tuple(int(length) for length in label[2 : 2 + label[1]]), DTYPES[label[0]]


def receive(transport: Transport, source: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """The shape and dtype in the label that `source` sends next."""
    label = np.empty(2 + MOST_DIMENSIONS, np.int64)
    transport.receive(label, source)
    return decode(label)
