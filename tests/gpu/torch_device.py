"""Runs the torch checks of tests/parallel on a GPU, or through hvdlite's GPU code on a machine without one."""

from __future__ import annotations

from typing import Any

import torch


def install(where: str) -> None:
    """Choose the device. where: 'cuda', or 'pretend': torch computes on the CPU, and hvdlite uses its GPU code."""
    if where == "cuda":
        torch.cuda.set_device(0)
        torch.set_default_device("cuda")
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = (
            False  # the checks' bounds are for float32
        )
        torch.backends.cudnn.deterministic = True
    else:
        pretend()


def pretend() -> None:
    """Put buckets into the pretend driver's memory, with torch tensors as their views.

    torch knows no pretend streams, so `precede` waits.
    """
    import cupy

    from hvdlite.arrays import bfloat16
    from hvdlite.gpu_streams import Mark
    from hvdlite.lanes.gpu_side import Gpu
    from hvdlite.torch import cuda
    from hvdlite.torch import tensors as _tensors
    from hvdlite.torch.attach import parameters
    from hvdlite.torch.distributed.buffers import KNOWN
    from hvdlite.torch.sharded import division, pieces

    assert hasattr(cupy, "LOG"), "this is a real CuPy"

    def to_array(tensor: torch.Tensor, dtype: Any) -> Any:
        short = tensor.dtype == torch.bfloat16
        bits = tensor.view(torch.int16).numpy().view(bfloat16) if short else tensor.numpy()
        memory = cupy.UnownedMemory.__new__(cupy.UnownedMemory)
        memory.ptr, memory.bits = bits.ctypes.data, bits
        return cupy.ndarray(bits.shape, bits.dtype, cupy.MemoryPointer(memory, 0), bits)

    def to_tensor(array: Any) -> torch.Tensor:
        if array.dtype == bfloat16:
            return torch.from_numpy(array.bits.view("int16")).view(torch.bfloat16)
        return torch.from_numpy(array.bits)

    class Stream:
        cuda_stream = 0

        def wait_stream(self, other: Stream) -> None:
            pass

    only = Stream()
    torch.cuda.current_stream = lambda number=None: only  # type: ignore[assignment, return-value]
    device_name = _tensors.device_name
    named = lambda tensor: "cuda" if tensor.is_cpu else device_name(tensor)  # noqa: E731
    _tensors.device_name = parameters.device_name = division.device_name = named  # type: ignore[attr-defined]
    pieces.flat = lambda row: to_array(row, KNOWN[row.dtype])  # type: ignore[assignment, attr-defined]
    cuda.to_array, cuda.to_tensor = to_array, to_tensor
    cuda.gpu_of = lambda tensors: Gpu(cupy, 0) if list(tensors) else None
    Mark.precede = Mark.wait
