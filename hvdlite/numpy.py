"""The neutral collectives for NumPy and CuPy arrays: new arrays out, arguments untouched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.ops import Op
from hvdlite.process_sets import ProcessSet


def contiguous_copy(value: Any) -> Array:
    """value as a new contiguous array; plain numbers become 0-dimensional ones."""
    on_device = hasattr(value, "__cuda_array_interface__")
    return value.copy(order="C") if on_device else np.array(value, order="C")


def allreduce(
    value: Any, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> Array:
    """The reduction of all ranks' arrays (Average by default), as a new array of the same shape and dtype."""
    how = ops.resolve_op(op, average)
    return ops.allreduce_(contiguous_copy(value), how, name, prescale_factor, postscale_factor, process_set)


def allgather(value: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """All ranks' arrays concatenated along the first dimension, which may differ."""
    return ops.allgather(contiguous_copy(value), name, process_set)


def broadcast(value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """root_rank's array, as a new array on every rank."""
    return ops.broadcast_(contiguous_copy(value), root_rank, name, process_set)


def broadcast_variables(variables: Any, root_rank: int = 0) -> None:
    """Overwrite arrays with root_rank's, in place. variables: an array, or a dict or sequence of arrays."""
    arrays = variables.values() if isinstance(variables, Mapping) else variables
    for array in [variables] if hasattr(variables, "dtype") else arrays:
        copy = contiguous_copy(array)
        ops.broadcast_(copy, root_rank)
        array[...] = copy
