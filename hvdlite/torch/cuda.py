"""torch on a GPU: conversion of tensors to CuPy arrays and back, torch's streams, and the choice of the GPU.

Arrays and tensors share memory. When a job begins, `choose_gpu` makes the GPU with this rank's local number the current
one, unless the script has used a GPU already.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch

from hvdlite import arrays, gpu_streams
from hvdlite.arrays import Array, DType, bfloat16, cupy
from hvdlite.errors import HvdliteError
from hvdlite.lanes.gpu_side import Gpu


def to_array(tensor: torch.Tensor, dtype: DType) -> Array:
    """Return a contiguous CUDA tensor's memory as a CuPy array of this dtype. Raises HvdliteError without CuPy."""
    gpu = gpu_at(tensor.device.index)
    with gpu.xp.cuda.Device(gpu.number):
        if tensor.numel() == 0:  # without memory, CuPy would take it for an array on the first GPU
            empty: Array = gpu.xp.empty(tuple(tensor.shape), dtype)
            return empty
        known = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # CuPy imports no bfloat16
        array: Array = gpu.xp.asarray(known)
        return array.view(dtype) if known is not tensor else array


def to_tensor(array: Array) -> torch.Tensor:
    """Return a CuPy array's memory as a tensor."""
    device = f"cuda:{arrays.device_of(array)}"
    if array.dtype == bfloat16:
        return torch.as_tensor(array.view("int16"), device=device).view(torch.bfloat16)
    return torch.as_tensor(array, device=device)


@cache
def gpu_at(number: int) -> Gpu:
    """Return a GPU, on which hvdlite waits for torch's streams from now on. Raises HvdliteError without CuPy."""
    gpu = Gpu(cupy(), number)
    follow_torch()
    return gpu


@cache
def follow_torch() -> None:
    """Have hvdlite wait for torch's current streams, and free torch's cached memory when a GPU has none left."""
    gpu_streams.FOLLOWED.append(lambda number: int(torch.cuda.current_stream(number).cuda_stream))
    gpu_streams.RELIEF.append(torch.cuda.empty_cache)


def gpu_of(tensors: Iterable[torch.Tensor]) -> Gpu | None:
    """Return the GPU that tensors lie on; None if all lie on the host. Raises HvdliteError for several GPUs."""
    numbers = sorted({tensor.device.index for tensor in tensors if tensor.device.type == "cuda"})
    if len(numbers) > 1:
        raise HvdliteError(
            f"the parameters of one process lie on GPUs {', '.join(map(str, numbers))}: hvdlite drives one GPU per "
            "process. Start one process per GPU, each with its model on cuda:hvd.local_rank() [HVD111]"
        )
    return gpu_at(numbers[0]) if numbers else None


@contextlib.contextmanager
def on_torchs_stream(gpu: Gpu) -> Iterator[None]:
    """Within this context, CuPy issues its work on torch's current stream, in order with torch's work."""
    stream = torch.cuda.current_stream(gpu.number).cuda_stream
    with gpu.xp.cuda.Device(gpu.number), gpu.xp.cuda.ExternalStream(stream):
        yield


class Streams:
    """The streams of one GPU on which autograd computes gradients, one stream at a time.

    Each stream waits for the one before it. Work that waits for the last stream therefore waits for all gradients.

    Attributes:
        number: The GPU's number.
        last: The last stream; None before the first gradient.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.last: torch.cuda.Stream | None = None

    def join(self, pack: Callable[[], None]) -> None:
        """Have the current stream wait for the last one.

        Args:
            pack: Copies the gradients computed so far, and frees them. It is called on the last stream: otherwise that
                stream would use their memory again before another stream has read them.
        """
        current = torch.cuda.current_stream(self.number)
        if current != self.last:
            if self.last is not None:
                with torch.cuda.stream(self.last):
                    pack()
                current.wait_stream(self.last)
            self.last = current


def choose_gpu(local_rank: int) -> None:
    """Make the GPU with this rank's number on its host torch's current one, unless the script has used a GPU already.

    Otherwise `model.cuda()` would use the first GPU on every rank.

    Args:
        local_rank: This rank's number among the ranks of its host.
    """
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available() and not used and torch.cuda.device_count() > 1:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def on_cpu(state: object) -> object:
    """Return nested dicts, lists and tuples with their CUDA tensors copied to the host.

    Another rank may not have the same GPU.
    """
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {key: on_cpu(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(on_cpu(value) for value in state)
    return state
