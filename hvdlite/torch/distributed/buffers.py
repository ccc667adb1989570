"""The memory of torch's tensors as flat arrays, for operations that read or overwrite them.

torch's own `tensor.numpy()` marks the memory as not resizable for ever, and FSDP and PowerSGD resize it. So arrays of
tensors on the host are made from their address. An array does not keep its tensor alive: the caller does.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from hvdlite.arrays import Array
from hvdlite.torch import cuda
from hvdlite.torch.tensors import DTYPES, device_name, is_plain, plain, require_dense

KNOWN = {dtype: np.dtype(name) for dtype, name in DTYPES.items()}


class Buffer:
    """A tensor's values as a flat array: the tensor's own memory, or a contiguous copy.

    Attributes:
        tensor: The tensor.
        memory: The tensor, or its copy.
        array: The flat array of `memory`: of the tensor's dtype, or of bytes if NumPy has no such dtype (float8).
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        """Raise TypeError or ValueError if the tensor is sparse, nested, or on a device that hvdlite cannot use."""
        require_dense(tensor)
        device_name(tensor)
        self.tensor = tensor
        self.memory = tensor.detach() if is_plain(tensor) else plain(tensor)
        self.array = flat(self.memory)

    def put_back(self) -> None:
        """Write the copy into the tensor, if there is a copy. Call this after the array was overwritten."""
        if self.memory.data_ptr() != self.tensor.data_ptr() or not is_plain(self.tensor):
            self.tensor.detach().copy_(self.memory)


def flat(tensor: torch.Tensor) -> Array:
    """A contiguous tensor's memory as a flat array, of bytes if NumPy has no such dtype."""
    dtype = KNOWN.get(tensor.dtype)
    if dtype is None:
        tensor, dtype = tensor.reshape(-1).view(torch.uint8), np.dtype(np.uint8)
    if tensor.is_cuda:
        return cuda.to_array(tensor, dtype).reshape(-1)
    if not tensor.numel():
        return np.empty(0, dtype)
    memory = memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
    array: Array = np.frombuffer(memory, dtype)
    return array
