"""Gradients on the wire in fewer bits. Horovod's shape: classes with static compress and decompress."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Compressor:
    """Interface. `wire`: the dtype in which floating-point gradients travel, by name; None: their own."""

    wire: str | None = None

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """The tensor to send, and what decompress needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """The received tensor in the original dtype."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """As it is."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        return tensor


def caster(dtype: tf.DType, name: str) -> type[Compressor]:
    """A compressor that casts floating-point tensors to dtype and leaves others alone."""

    class Cast(Compressor):
        wire = dtype.name

        @staticmethod
        def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return (tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

        @staticmethod
        def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
            return tf.cast(tensor, ctx)

    Cast.__name__ = Cast.__qualname__ = name
    Cast.__doc__ = f"Floating-point tensors travel as {dtype.name}; sums are computed in float32."
    return Cast


FP16Compressor = caster(tf.float16, "FP16Compressor")
BF16Compressor = caster(tf.bfloat16, "BF16Compressor")


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
