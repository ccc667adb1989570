"""Device memory of the pretend CuPy: ordinary memory, or the pretend driver's with PRETEND_CUDA_DRIVER=1."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np

DRIVER = ctypes.CDLL("libcuda.so.1") if os.environ.get("PRETEND_CUDA_DRIVER") else None


class CUDARuntimeError(RuntimeError):
    pass


def check(code: int) -> None:
    if code:
        raise CUDARuntimeError(f"the pretend driver says {code}")


def bits_at(address: int, nbytes: int, owner: Any) -> np.ndarray:
    """Device memory for the pretend kernels, as an array that keeps `owner` alive.

    An address that the driver does not know is a framework's, on the host.
    """
    if DRIVER is not None:
        DRIVER.pretend_alias.restype = ctypes.c_void_p
        address = DRIVER.pretend_alias(ctypes.c_uint64(address)) or address
    buffer: Any = (ctypes.c_uint8 * nbytes).from_address(address)
    buffer.owner = owner
    return np.frombuffer(buffer, np.uint8)


class Allocation:
    """Device memory. It lives while arrays or waiting work refer to it."""

    made = gone = 0

    def __init__(self, nbytes: int) -> None:
        Allocation.made += 1
        if DRIVER is None:
            self.host = np.full(nbytes, 0xA5, np.uint8)
            self.ptr = self.host.ctypes.data
        else:
            address = ctypes.c_uint64()
            check(DRIVER.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes)))
            self.ptr = address.value

    def __del__(self) -> None:
        Allocation.gone += 1
        if DRIVER is not None:
            DRIVER.cuMemFree_v2(ctypes.c_uint64(self.ptr))


class Memory:
    """Device memory. ptr: its device address; bits: the same bytes for pretend kernels."""

    def __init__(self, nbytes: int) -> None:
        allocation = Allocation(max(nbytes, 1))
        self.ptr, self.bits = allocation.ptr, bits_at(allocation.ptr, max(nbytes, 1), allocation)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.bits = ptr, bits_at(ptr, size, owner)


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        assert offset == 0
        self.mem = mem
