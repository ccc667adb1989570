"""torch tensors as NumPy or CuPy arrays and back: two objects on one memory, converted without a copy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from hvdlite.arrays import Array, bfloat16
from hvdlite.torch import cuda

DTYPES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16", torch.bfloat16: "bfloat16",
    torch.uint8: "uint8", torch.int8: "int8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.bool: "bool", torch.complex64: "complex64", torch.complex128: "complex128", torch.uint16: "uint16",
    torch.uint32: "uint32", torch.uint64: "uint64",
}  # fmt: skip
"""hvdlite's names of torch's dtypes that can be communicated."""


def require_dense(tensor: torch.Tensor) -> None:
    """Raise TypeError for an object that is no tensor, ValueError for a sparse or nested tensor."""
    if not isinstance(tensor, torch.Tensor):
        plain = isinstance(tensor, (int, float, complex, list, tuple, np.ndarray, np.generic))
        cure = "use torch.as_tensor(...)" if plain else "objects travel by hvd.allgather_object, hvd.broadcast_object"
        raise TypeError(f"hvdlite.torch takes tensors, not {type(tensor).__name__}: {cure}")
    if tensor.is_nested:
        raise ValueError("a nested tensor: give its parts one by one (tensor.unbind())")
    if tensor.layout is not torch.strided:
        cure = "add it up with hvd.sparse_allreduce_async, or " if tensor.layout is torch.sparse_coo else ""
        raise ValueError(f"a sparse tensor ({tensor.layout}): {cure}make it .to_dense()")


def dtype_name(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> str:
    """Return hvdlite's name of a dtype. Raises ValueError if the dtype cannot be communicated.

    Args:
        tensor: The tensor.
        dtype: The dtype, for example that of the tensor's gradient; None: the tensor's own.
    """
    dtype = dtype or tensor.dtype
    try:
        return DTYPES[dtype]
    except KeyError:
        cure = "give its .dequantize()" if tensor.is_quantized else "cast it first"
        raise ValueError(f"hvdlite cannot communicate {dtype} tensors: {cure}") from None


def device_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's device in bucket plans. Raises ValueError for a device that hvdlite cannot use."""
    if tensor.is_cpu:
        return "host"
    if tensor.is_cuda:
        return "cuda"  # without its number, which differs between ranks
    cure = (
        "it has no values (torch.empty_like(tensor, device='cpu') makes room)"
        if tensor.is_meta
        else ("move it to the CPU or a CUDA GPU")
    )
    raise ValueError(f"hvdlite cannot communicate tensors on {tensor.device}: {cure}")


def to_array(tensor: torch.Tensor) -> Array:
    """Return a tensor's memory as an array. Raises ValueError unless the tensor is contiguous and its dtype known."""
    name = dtype_name(tensor)
    if not is_plain(tensor):
        raise ValueError("the tensor is not contiguous: call .contiguous() first (.resolve_conj() of a conjugate)")
    if device_name(tensor) == "cuda":  # detach(): the array keeps this memory even if tensor.data is replaced
        return cuda.to_array(tensor.detach(), np.dtype(name))
    if tensor.requires_grad:
        tensor = tensor.detach()
    if name == "bfloat16":
        integers: Array = tensor.view(torch.int16).numpy()
        return integers.view(bfloat16)
    return tensor.numpy()


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory holds its values, in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its memory holds the conjugates or negatives of its values."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def fresh(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same layout (channels_last, say), to be overwritten."""
    require_dense(tensor)
    return resolved(tensor.detach().clone(memory_format=torch.preserve_format))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, to be overwritten. Ranks exchange these, since their layouts may differ."""
    return resolved(tensor.detach().clone(memory_format=torch.contiguous_format))


def readable(tensor: torch.Tensor) -> Array:
    """Return a tensor's values as an array: its own memory, or a contiguous copy."""
    require_dense(tensor)
    return to_array(resolved(tensor.detach().contiguous()))


def in_place(tensor: torch.Tensor) -> tuple[Array, Callable[[object], torch.Tensor]]:
    """Return contiguous memory for an operation in place, and the function that delivers the result to the tensor.

    The function takes one argument, which it ignores, and returns the tensor. A tensor that is not contiguous changes
    when the result is delivered. Autograd does not notice: leaf parameters are allowed, and no version changes.

    Raises:
        ValueError: Elements of the tensor share memory (expand).
    """
    require_dense(tensor)
    if is_plain(tensor):
        return to_array(tensor), lambda _: tensor
    if any(stride == 0 and length > 1 for stride, length in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("a tensor whose elements share memory (expand) cannot be written in place: give its .clone()")
    copy = plain(tensor)

    def put_back(_: object) -> torch.Tensor:
        tensor.data.copy_(copy)
        return tensor

    return to_array(copy), put_back


def laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in the layout of `like`, which has the same shape: the tensor itself, or a copy."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, requires_grad=False).copy_(tensor)


def row(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as a row, in the order of memory, in the same memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def to_tensor(array: Array) -> torch.Tensor:
    """Return an array's memory as a tensor."""
    if not isinstance(array, np.ndarray):
        return cuda.to_tensor(array)
    if array.dtype == bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
