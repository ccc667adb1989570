"""Gradients on the wire in fewer bits. Horovod's shape: classes with static compress and decompress."""

from __future__ import annotations

from typing import Any

import torch


class Compressor:
    """Interface. `wire` is the dtype in which floating-point gradients travel; None: their own."""

    wire: torch.dtype | None = None

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and what decompress needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The received tensor in the original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


def caster(dtype: torch.dtype, name: str) -> type[Compressor]:
    """A compressor that casts floating-point tensors to dtype and leaves others alone."""

    class Cast(Compressor):
        wire = dtype

        @staticmethod
        def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return (tensor.to(dtype) if tensor.is_floating_point() else tensor), tensor.dtype

        @staticmethod
        def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
            return tensor.to(ctx)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Floating-point tensors travel as {dtype}; sums are computed in float32."
    return Cast


FP16Compressor = caster(torch.float16, "FP16Compressor")
BF16Compressor = caster(torch.bfloat16, "BF16Compressor")


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def wire_dtype(compression: Any) -> torch.dtype | None:
    """The wire dtype of one of ours. Raises ValueError for a compressor that does more than cast."""
    wire: torch.dtype | None = getattr(compression, "wire", None)
    if wire is None and compression is not NoneCompressor and not isinstance(compression, NoneCompressor):
        raise ValueError(
            f"DistributedOptimizer: {compression!r} has no `wire` dtype. Use Compression.none, .fp16 or .bf16."
        )
    return wire
