"""Torch tensors on a GPU: as CuPy arrays of the same memory and back, and the streams that torch issues work on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import torch

from hvdlite import arrays, gpu_streams
from hvdlite.arrays import Array, DType, bfloat16, cupy
from hvdlite.errors import HvdliteError
from hvdlite.lanes.gpu_side import Gpu


def to_array(tensor: torch.Tensor, dtype: DType) -> Array:
    """A contiguous CUDA tensor's memory as a CuPy array. Raises HvdliteError where there is no CuPy."""
    gpu = gpu_at(tensor.device.index)
    with gpu.xp.cuda.Device(gpu.number):
        if tensor.numel() == 0:  # CuPy would take what has no memory for the first GPU's
            empty: Array = gpu.xp.empty(tuple(tensor.shape), dtype)
            return empty
        known = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # CuPy imports no bfloat16
        array: Array = gpu.xp.asarray(known)
        return array.view(dtype) if known is not tensor else array


def to_tensor(array: Array) -> torch.Tensor:
    """The array's memory as a tensor."""
    device = f"cuda:{arrays.device_of(array)}"
    if array.dtype == bfloat16:
        return torch.as_tensor(array.view("int16"), device=device).view(torch.bfloat16)
    return torch.as_tensor(array, device=device)


@cache
def gpu_at(number: int) -> Gpu:
    """A GPU as the core knows it, which from now on waits for torch's streams. Raises HvdliteError without CuPy."""
    gpu = Gpu(cupy(), number)
    follow_torch()
    return gpu


@cache
def follow_torch() -> None:
    gpu_streams.FOLLOWED.append(lambda number: int(torch.cuda.current_stream(number).cuda_stream))
    gpu_streams.RELIEF.append(torch.cuda.empty_cache)


def gpu_of(tensors: Iterable[torch.Tensor]) -> Gpu | None:
    """The GPU that tensors lie on; None where all are on the host. Raises HvdliteError where they lie on several."""
    numbers = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    if len(numbers) > 1:
        raise HvdliteError(
            f"the parameters of one process lie on GPUs {', '.join(map(str, numbers))}: hvdlite drives one GPU per "
            "process. Start one process per GPU, each with its model on cuda:hvd.local_rank()"
        )
    return gpu_at(numbers[0]) if numbers else None


@contextlib.contextmanager
def on_torchs_stream(gpu: Gpu) -> Iterator[None]:
    """Inside, what CuPy is told to do comes in order with what torch is, on torch's current stream."""
    stream = torch.cuda.current_stream(gpu.number).cuda_stream
    with gpu.xp.cuda.Device(gpu.number), gpu.xp.cuda.ExternalStream(stream):
        yield


class Streams:
    """Autograd computes gradients on several streams, one at a time: each goes on behind the one before, so that what
    is behind the last is behind all."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.last: torch.cuda.Stream | None = None

    def join(self, pack: Callable[[], None]) -> None:
        """The current stream goes on behind the last. pack: called on that one, whose gradients it lets go of: their
        memory would be used again there before another stream had read them."""
        current = torch.cuda.current_stream(self.number)
        if current != self.last:
            if self.last is not None:
                with torch.cuda.stream(self.last):
                    pack()
                current.wait_stream(self.last)
            self.last = current


def choose_gpu(local_rank: int) -> None:
    """Make the GPU with this rank's number on its host torch's current one, where the script has not chosen nor used
    any: without it every rank's `model.cuda()` would go to the first."""
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and not used and torch.cuda.device_count() > 1:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def on_cpu(state: Any) -> Any:
    """Nested dicts, lists and tuples with their CUDA tensors copied to the host: another rank may have no such GPU."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_cpu(value) for value in state)
    return state
