"""Arrays without knowing which: NumPy or CuPy, found from the array itself.

The core does its arithmetic through `module(array)` and orders it through marks (`gpu_streams`), so that one code path
serves both. Nothing here imports CuPy: an array that is not NumPy's brings its own module along.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, Protocol, TypeAlias

import ml_dtypes
import numpy as np

from hvdlite.errors import HvdliteError

DType: TypeAlias = "np.dtype[np.generic]"


class Array(Protocol):
    """What the core asks of an array. `numpy.ndarray` and `cupy.ndarray` both satisfy it.

    Methods with many forms are properties here, so that each form of NumPy's fits. Only arrays on the host
    have `ctypes` and `__array__`, and their `data` is a memoryview. On a GPU `data` has a pointer (`data.ptr`), and
    `device` a number. Code that uses these asks `is_host` before.
    """

    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def flags(self) -> Any: ...
    @property
    def data(self) -> Any: ...
    @property
    def reshape(self) -> Callable[..., Array]: ...
    @property
    def view(self) -> Callable[..., Array]: ...
    @property
    def astype(self) -> Callable[..., Array]: ...
    @property
    def copy(self) -> Callable[..., Array]: ...
    @property
    def tobytes(self) -> Callable[..., bytes]: ...
    @property
    def tolist(self) -> Callable[..., Any]: ...
    @property
    def ctypes(self) -> Any: ...
    @property
    def device(self) -> Any: ...
    def __array__(self) -> np.ndarray[tuple[int, ...], DType]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: Any, /) -> Any: ...
    def __setitem__(self, key: Any, value: Any, /) -> None: ...
    def __and__(self, other: Any, /) -> Any: ...
    def __add__(self, other: Any, /) -> Any: ...
    def __mul__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...
    def __truediv__(self, other: Any, /) -> Any: ...
    def __lt__(self, other: Any, /) -> Any: ...
    def __ge__(self, other: Any, /) -> Any: ...


bfloat16 = np.dtype(ml_dtypes.bfloat16)
LINE = 64  # bytes of a cache line: what is written across two of them, or in one by two cores, takes longer
LONG = 256 * 1024  # bytes; of shorter arrays it is not worth asking where they lie (1 us)


def module(array: Array) -> ModuleType:
    """NumPy for a NumPy array, CuPy for a CuPy array."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def cupy() -> ModuleType:
    """CuPy, imported. Raises HvdliteError where it is missing."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise HvdliteError(
            f"tensors on a GPU need CuPy, which cannot be imported ({error}): pip install cupy-cuda12x, or "
            "cupy-cuda13x, whichever your CUDA is"
        ) from error


def nccl_of(xp: ModuleType) -> Any:
    """CuPy's module for NCCL, which it imports only when asked; its `available` says whether there is a library."""
    return importlib.import_module(f"{xp.__name__}.cuda.nccl")


def is_host(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def per_line(like: Array) -> int:
    """How many elements of like's dtype a cache line has."""
    return max(LINE // int(like.itemsize), 1)


def on_boundary(nbytes: int, boundary: int = LINE) -> Array:
    """Bytes on the host, of any contents, whose address is a multiple of `boundary`."""
    memory = np.empty(nbytes + boundary, np.uint8)
    start = -memory.ctypes.data % boundary
    return memory[start : start + nbytes]


def as_bytes(array: Array) -> Array:
    """The same memory as flat uint8. The array must be contiguous."""
    return array.reshape(-1).view(np.uint8)


def split_rows(array: Array, rows: Sequence[int]) -> list[Array]:
    """Views of the array's first rows[0] rows, the next rows[1], ..."""
    return [array[stop - count : stop] for count, stop in zip(rows, accumulate(rows), strict=True)]


def overlapping(arrays: Sequence[Array]) -> tuple[int, int] | None:
    """The places of two of these contiguous arrays that share memory; None where each has its own."""
    if len({*map(id, arrays)}) == len(arrays) and all(is_host(array) and array.flags.owndata for array in arrays):
        return None  # an address takes 1 us
    starts = {index: array.ctypes.data if is_host(array) else array.data.ptr
              for index, array in enumerate(arrays) if array.nbytes}  # fmt: skip
    for first, second in pairwise(sorted(starts, key=starts.__getitem__)):
        if starts[first] + arrays[first].nbytes > starts[second]:
            return first, second
    return None


@cache
def dtype_name(dtype: DType) -> str:
    """'float32', 'bfloat16', ...; all fields of a structure. Cached: NumPy computes it anew each time, in 5 us."""
    return str(dtype.name if dtype.fields is None else dtype)


def is_small_float(dtype: DType) -> bool:
    """float16 or bfloat16 (a floating type too, although NumPy files it under 'V')."""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def is_float(dtype: DType) -> bool:
    return dtype.kind == "f" or is_small_float(dtype)


def accumulator(dtype: DType) -> DType:
    """The dtype in which sums of `dtype` are computed."""
    return np.dtype(np.float32) if is_small_float(dtype) else dtype


def device_of(array: Array) -> int:
    """The number of the GPU that a device array lies on."""
    return int(array.device.id)


