"""Arrays of NumPy or CuPy, handled by the same code.

`module(array)` returns NumPy or CuPy, and hvdlite computes with the functions of that module. `gpu_streams` puts the
work in order. CuPy is imported only when the first array on a GPU appears.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, Protocol, TypeAlias, cast

import ml_dtypes
import numpy as np

from hvdlite.errors import HvdliteError

DType: TypeAlias = "np.dtype[np.generic]"


class Flags(Protocol):
    """An array's flags."""

    @property
    def owndata(self) -> bool: ...
    @property
    def c_contiguous(self) -> bool: ...
    @property
    def writeable(self) -> bool: ...


class Ctypes(Protocol):
    """A host array's `ctypes`. data: the array's address."""

    @property
    def data(self) -> int: ...


class Device(Protocol):
    """A GPU array's `device`. id: the GPU's number."""

    @property
    def id(self) -> int: ...


class Array(Protocol):
    """The methods and attributes of arrays that hvdlite uses. `numpy.ndarray` and `cupy.ndarray` both have them.

    Methods that NumPy overloads are properties here, so that each of NumPy's signatures fits. Only arrays on the host
    have `ctypes` and `__array__`; their `data` is a memoryview. On a GPU, `data.ptr` is an address and `device.id` a
    number. Code that uses these calls `is_host` first.
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
    def flags(self) -> Flags: ...
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
    def sum(self) -> Callable[..., Array]: ...
    @property
    def item(self) -> Callable[..., float]: ...
    @property
    def ctypes(self) -> Ctypes: ...
    @property
    def device(self) -> object: ...
    def __array__(self) -> np.ndarray[tuple[int, ...], DType]: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object) -> Any: ...
    @property
    def __getitem__(self) -> Callable[..., Any]: ...
    @property
    def __setitem__(self) -> Callable[..., None]: ...
    @property
    def __and__(self) -> Callable[..., Array]: ...
    @property
    def __add__(self) -> Callable[..., Array]: ...
    @property
    def __sub__(self) -> Callable[..., Array]: ...
    @property
    def __mul__(self) -> Callable[..., Array]: ...
    @property
    def __floordiv__(self) -> Callable[..., Array]: ...
    @property
    def __truediv__(self) -> Callable[..., Array]: ...


bfloat16 = np.dtype(ml_dtypes.bfloat16)
LINE = 64  # bytes of a cache line; a write across two lines, or by two cores into one, takes longer
LONG = 256 * 1024  # bytes; to align shorter arrays gains less than reading their address costs (1 us)


def module(array: Array) -> ModuleType:
    """NumPy for a NumPy array, CuPy for a CuPy array."""
    return np if isinstance(array, np.ndarray) else sys.modules["cupy"]


def cupy() -> ModuleType:
    """Import CuPy. Raises HvdliteError if it cannot be imported."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise HvdliteError(
            f"tensors on a GPU need CuPy, which cannot be imported ({error}): pip install cupy-cuda12x for CUDA 12, or "
            "cupy-cuda13x for CUDA 13 [HVD110]"
        ) from error


def nccl_of(xp: ModuleType) -> ModuleType:
    """CuPy's module for NCCL, imported. Its `available` says whether the NCCL library was found."""
    return importlib.import_module(f"{xp.__name__}.cuda.nccl")


def is_host(array: Array) -> bool:
    """Whether the array lies in host memory."""
    return isinstance(array, np.ndarray)


def per_line(like: Array) -> int:
    """The number of elements of like's dtype in a cache line."""
    return max(LINE // int(like.itemsize), 1)


def on_boundary(nbytes: int, boundary: int = LINE) -> Array:
    """Bytes on the host that begin at a multiple of `boundary`. Their contents are undefined."""
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
    """The indices of two of these contiguous arrays that share memory; None if no two of them do."""
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
    """A dtype's name: 'float32', 'bfloat16', ...; for a structure all fields. Cached: NumPy takes 5 us for it."""
    return str(dtype.name if dtype.fields is None else dtype)


def is_small_float(dtype: DType) -> bool:
    """Whether the dtype is float16 or bfloat16. (NumPy's kind of bfloat16 is 'V', not 'f'.)"""
    return dtype.itemsize == 2 and dtype.kind in "fV"


def is_float(dtype: DType) -> bool:
    """Whether the dtype is a floating-point type of any size."""
    return dtype.kind == "f" or is_small_float(dtype)


def accumulator(dtype: DType) -> DType:
    """The dtype in which sums of `dtype` are computed."""
    return np.dtype(np.float32) if is_small_float(dtype) else dtype


def device_of(array: Array) -> int:
    """The number of the GPU that a device array lies on."""
    return cast("Device", array.device).id
