"""A pretend CuPy, over NumPy: the parts that hvdlite uses. See the package.

Kernels, copies and waits queue up in their stream (`streams`). They run at a `synchronize` of the stream, of an event
after them, or of another stream that waits for such an event.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np

from tests.pretend.memory import (  # noqa: F401
    DRIVER,
    Allocation,
    CUDARuntimeError,
    Memory,
    MemoryPointer,
    UnownedMemory,
    check,
)
from tests.pretend.streams import (
    LOCK,
    LOG,
    NUMBERS,
    Device,
    Event,
    Stream,
    eventRecord,
    get_current_stream,
    issue,
    streamWaitEvent,
)


class ndarray:
    """A device array. Only pretend kernels may use `bits`."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: MemoryPointer | None = None, bits: Any = None) -> None:
        kind = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, int) else tuple(int(n) for n in shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        self.mem = memptr.mem if memptr else Memory(nbytes)
        self.bits = self.mem.bits[:nbytes].view(kind).reshape(shape) if bits is None else bits

    def like(self, bits: np.ndarray) -> ndarray:
        """Another array of the same memory."""
        return ndarray(bits.shape, bits.dtype, MemoryPointer(self.mem, 0), bits)

    shape = property(lambda self: self.bits.shape)
    dtype = property(lambda self: self.bits.dtype)
    size = property(lambda self: self.bits.size)
    ndim = property(lambda self: self.bits.ndim)
    nbytes = property(lambda self: self.bits.nbytes)
    itemsize = property(lambda self: self.bits.itemsize)
    device = property(lambda self: SimpleNamespace(id=0))

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.mem.ptr + self.bits.ctypes.data - self.mem.bits.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        assert self.bits.flags.c_contiguous
        kind = self.dtype.str
        return {"shape": self.shape, "typestr": kind, "data": (self.data.ptr, False), "version": 3, "strides": None}

    def __len__(self) -> int:
        return len(self.bits)

    def __getitem__(self, key: Any) -> ndarray:
        return self.like(self.bits[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        target, source = self.bits[key], bits_of(value)
        issue(lambda: np.copyto(target, source, casting="unsafe"))

    def reshape(self, *shape: Any) -> ndarray:
        return self.like(self.bits.reshape(*shape))

    def view(self, dtype: Any) -> ndarray:
        return self.like(self.bits.view(dtype))

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if not copy and self.dtype == dtype:
            return self
        result = ndarray(self.shape, dtype)
        result[...] = self
        return result

    def copy(self, order: str = "C") -> ndarray:
        return self.astype(self.dtype)

    def get(self) -> np.ndarray:
        """A host copy. Waits for the current stream."""
        result = np.empty(self.shape, self.dtype)
        issue(lambda: np.copyto(result, self.bits))
        get_current_stream().synchronize()
        return result

    def set(self, value: np.ndarray) -> None:
        self[...] = np.array(value)
        get_current_stream().synchronize()

    def __iadd__(self, other: Any) -> ndarray:
        return add(self, other, out=self)

    def __add__(self, other: Any) -> ndarray:
        return add(self, other)

    def __sub__(self, other: Any) -> ndarray:
        return subtract(self, other)

    def __mod__(self, other: Any) -> ndarray:
        return remainder(self, other)

    def __mul__(self, other: Any) -> ndarray:
        return multiply(self, other)

    def __truediv__(self, other: Any) -> ndarray:
        return divide(self, other)

    def __floordiv__(self, other: Any) -> ndarray:
        return floor_divide(self, other)

    def __lt__(self, other: Any) -> ndarray:
        return less(self, other)

    def __and__(self, other: Any) -> ndarray:
        return logical_and(self, other)

    def __ne__(self, other: Any) -> ndarray:  # type: ignore[override]
        return not_equal(self, other)

    __hash__ = object.__hash__


def bits_of(value: Any) -> Any:
    return value.bits if isinstance(value, ndarray) else value


def kernel(function: np.ufunc) -> Callable[..., Any]:
    def launch(*operands: Any, out: ndarray | None = None) -> ndarray:
        inputs = [bits_of(operand) for operand in operands[: function.nin]]
        (out,) = operands[function.nin :] or (out,)
        if out is None:
            samples = [np.ones(1, each.dtype) if isinstance(each, np.ndarray) else each for each in inputs]
            out = ndarray(np.broadcast_shapes(*map(np.shape, inputs)), function(*samples).dtype)
        target = out.bits
        LOG.append((function.__name__, get_current_stream().ptr))
        issue(lambda: function(*inputs, out=target, casting="unsafe"))
        return out

    return launch


add, multiply, divide, floor_divide = map(kernel, (np.add, np.multiply, np.divide, np.floor_divide))
minimum, maximum, logical_or, logical_and = map(kernel, (np.minimum, np.maximum, np.logical_or, np.logical_and))
less, not_equal, trunc, subtract, remainder = map(kernel, (np.less, np.not_equal, np.trunc, np.subtract, np.remainder))


SHORT = np.dtype(ml_dtypes.bfloat16)
WIDEN = {"float16": lambda x: x.astype(np.float32), "uint16": lambda x: x.view(SHORT).astype(np.float32)}
NARROW = {"float16": lambda x: x.astype(np.float16), "uint16": lambda x: x.astype(SHORT).view(np.uint16)}


class ElementwiseKernel:
    """Runs a kernel's text as Python, with NumPy's arithmetic. The text must be one assignment that is also valid Python.

    `wide` and `narrow`, which the preamble defines in C++, are casts. So this tests the order of operations, not the C++.
    """

    def __init__(self, inputs: str, outputs: str, operation: str, name: str, preamble: str, options: Any) -> None:
        self.params = [param.split() for param in f"{inputs}, {outputs}".split(", ") if param]
        self.outputs = [param.split()[1] for param in outputs.split(", ")]
        self.operation, self.name, self.kind = operation, name, outputs.split()[0]
        assert "wide" in preamble and options == ("--fmad=false",)

    def __call__(self, *given: Any) -> None:
        assert len(given) == len(self.params)
        values = {}
        for (kind, name), value in zip(self.params, given, strict=True):
            assert np.dtype(kind) == value.dtype, (kind, name, value.dtype)
            values[name] = bits_of(value)

        def run() -> None:
            same = lambda x: x  # noqa: E731
            scope = {**values, "wide": WIDEN.get(self.kind, same), "narrow": NARROW.get(self.kind, same)}
            exec(self.operation.rstrip(";"), scope)
            for name in self.outputs:
                np.copyto(values[name], scope[name], casting="no")

        LOG.append((self.name, get_current_stream().ptr))
        issue(run)


def from_dlpack(exporter: Any) -> ndarray:
    """An array of the exporter's memory. It is host memory, and counts as GPU memory. No stream is waited for."""
    assert exporter.__dlpack_device__() == (2, 0)
    bits = np.from_dlpack(OnHost(exporter.__dlpack__(stream=1, max_version=(1, 0))))
    memory = UnownedMemory.__new__(UnownedMemory)
    memory.ptr, memory.bits = bits.ctypes.data, bits
    LOG.append(("import", bits.nbytes))
    return ndarray(bits.shape, bits.dtype, MemoryPointer(memory, 0), bits)


class OnHost:
    """A DLPack exporter on the host, for NumPy."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def copyto(target: ndarray, source: Any, casting: str = "same_kind") -> None:
    target[...] = source


def empty(shape: Any, dtype: Any = float) -> Any:
    return ndarray(shape, dtype)


def asarray(value: Any, dtype: Any = None) -> Any:
    host = np.array(value, dtype)
    result = ndarray(host.shape, host.dtype)
    result[...] = host
    return result


def zeros(shape: Any, dtype: Any = float) -> Any:
    return asarray(np.zeros(shape, dtype))


def zeros_like(array: ndarray) -> ndarray:
    return zeros(array.shape, array.dtype)


# the runtime's own interface

PINNED: list[bytearray] = []
"""Page-locked memory, kept for ever: copies may run after a test, if nothing has waited for them."""


def alloc_pinned_memory(nbytes: int) -> bytearray:
    PINNED.append(bytearray(nbytes))
    return PINNED[-1]


def memcpyAsync(target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
    LOG.append(("to host" if kind == 2 else "to device", nbytes, stream))

    def copy() -> None:
        if DRIVER is None:
            ctypes.memmove(target, source, nbytes)
        else:
            check(DRIVER.cuMemcpy(*map(ctypes.c_uint64, (target, source, nbytes))))

    issue(copy, Stream.known[stream])


class Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def ipcGetMemHandle(address: int) -> bytes:
    LOG.append(("export",))
    if DRIVER is None:
        return str(address).encode()
    handle = (ctypes.c_uint8 * 64)()
    check(DRIVER.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(address)))
    return bytes(handle)


class ByValue(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_uint8 * 64),)


def ipcOpenMemHandle(handle: bytes) -> int:
    LOG.append(("open",))
    if DRIVER is None:
        return int(handle)
    address = ctypes.c_uint64()
    check(DRIVER.cuIpcOpenMemHandle_v2(ctypes.byref(address), ByValue.from_buffer_copy(handle), ctypes.c_uint(1)))
    return address.value


def ipcCloseMemHandle(address: int) -> None:
    LOG.append(("close",))
    if DRIVER is not None:
        check(DRIVER.cuIpcCloseMemHandle(ctypes.c_uint64(address)))


runtime = SimpleNamespace(
    pointerGetAttributes=lambda address: SimpleNamespace(device=0),
    CUDARuntimeError=CUDARuntimeError, eventRecord=eventRecord, streamWaitEvent=streamWaitEvent,
    streamIsCapturing=lambda stream: False, memcpyAsync=memcpyAsync, memcpyDeviceToHost=2, memcpyHostToDevice=1,
    ipcGetMemHandle=ipcGetMemHandle, ipcOpenMemHandle=ipcOpenMemHandle, ipcCloseMemHandle=ipcCloseMemHandle,
    driverGetVersion=lambda: 13000, getDeviceCount=lambda: 1, getDevice=lambda: 0, deviceGetPCIBusId=lambda number: "0000:00:00.0",
)  # fmt: skip


def current_context() -> int:
    context = ctypes.c_void_p(1)
    if DRIVER is not None:
        check(DRIVER.cuCtxGetCurrent(ctypes.byref(context)))
    return context.value or 0


class NcclCommunicator:
    """A communicator whose ranks are threads. It all-reduces float32 sums at once, when all ranks have called."""

    meetings: dict[Any, tuple[threading.Barrier, list[Any]]] = {}  # noqa: RUF012
    open = 0

    def __init__(self, size: int, identity: Any, rank: int) -> None:
        with LOCK:
            self.gate, self.given = self.meetings.setdefault(
                identity, (threading.Barrier(size, timeout=30), [None] * size)
            )
            NcclCommunicator.open += 1
        self.rank = rank

    def allReduce(self, source: int, target: int, count: int, dtype: int, how: int, stream: int) -> None:
        assert (dtype, how) == (7, 0)
        Stream.known[stream].synchronize()
        memory: Any = (ctypes.c_uint8 * (4 * count)).from_address(source)
        mine = np.frombuffer(memory, np.float32)
        self.given[self.rank] = mine.copy()
        self.gate.wait()
        mine[:] = np.sum(self.given, axis=0)
        self.gate.wait()

    def destroy(self) -> None:
        with LOCK:
            NcclCommunicator.open -= 1


nccl = SimpleNamespace(
    available=True, get_unique_id=lambda: next(NUMBERS), NcclCommunicator=NcclCommunicator, NCCL_FLOAT32=7, NCCL_SUM=0
)
sys.modules[f"{__name__}.cuda.nccl"] = nccl  # type: ignore[assignment]


def get_default_memory_pool() -> SimpleNamespace:
    return SimpleNamespace(free_all_blocks=lambda: None)


cuda = SimpleNamespace(
    driver=SimpleNamespace(ctxGetCurrent=current_context),
    Stream=Stream, ExternalStream=Stream.known.__getitem__, Event=Event, Device=Device, Memory=Memory, UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer,
    get_current_stream=get_current_stream, alloc_pinned_memory=alloc_pinned_memory, runtime=runtime,
)  # fmt: skip
