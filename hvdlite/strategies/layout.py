"""All parameters of a model as one flat array on the host, and the part of it that each owner keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.arrays import Array, DType, dtype_name, is_float, module
from hvdlite.gpu_streams import issued, mark, on_host
from hvdlite.lanes.signature import digest


@dataclass(frozen=True)
class Layout:
    """Where each parameter lies in the flat array.

    The flat array is float64 if any parameter is, else float32: half-precision weights, too, are added in float32.

    Attributes:
        sizes: The parameters' numbers of elements.
        dtype: The flat array's dtype.
        borders: Where each owner's part begins, and the end.
        plan: A digest of the parameters' names, shapes and dtypes.
    """

    sizes: tuple[int, ...]
    dtype: DType
    borders: tuple[int, ...]
    plan: int

    def part(self, place: int) -> slice:
        """The part of the owner with this place among the owners."""
        return slice(self.borders[place], self.borders[place + 1])

    def flatten(self, arrays: Sequence[Array | None]) -> Array:
        """The arrays as a new flat array on the host; zeros for None."""
        flat, at = np.zeros(self.borders[-1], self.dtype), 0
        for array, size in zip(arrays, self.sizes, strict=True):
            if array is not None:
                flat[at : at + size] = on_host(array).reshape(-1)
            at += size
        return flat

    def overwrite(self, arrays: Sequence[Array], flat: Array) -> None:
        """Overwrite the arrays, in place, with the flat array's values."""
        at = 0
        for array, size in zip(arrays, self.sizes, strict=True):
            piece = flat[at : at + size].reshape(array.shape).astype(array.dtype)
            mark(array).precede()
            array[...] = module(array).asarray(piece)
            issued(array).precede()
            at += size


def layout(names: Sequence[str], weights: Sequence[Array], owners: int) -> Layout:
    """The layout of these parameters, for so many owners.

    Raises:
        TypeError: A parameter has no floating-point dtype.
    """
    for name, weight in zip(names, weights, strict=True):
        if not is_float(weight.dtype):
            raise TypeError(
                f"{name} is {dtype_name(weight.dtype)}: BoundedStaleness can add floating-point numbers only"
            )
    sizes = tuple(int(weight.size) for weight in weights)
    wide = any(weight.dtype == np.float64 for weight in weights)
    lines = [f"{name} {dtype_name(w.dtype)}{list(w.shape)}" for name, w in zip(names, weights, strict=True)]
    borders = tuple(sum(sizes) * place // owners for place in range(owners + 1))
    return Layout(sizes, np.dtype(np.float64 if wide else np.float32), borders, digest(str(lines)))
