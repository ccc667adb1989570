"""Compressors of TensorFlow tensors."""

from __future__ import annotations

import tensorflow as tf

from hvdlite.gradients.compression import Compressor, LossyChoices, NoneCompressor, caster

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


def is_floating(tensor: tf.Tensor) -> bool:
    """Return whether the tensor's dtype is a floating-point one, so that the compressors cast the tensor."""
    return bool(tensor.dtype.is_floating)


FP16Compressor = caster("FP16Compressor", "float16", is_floating, tf.cast)
BF16Compressor = caster("BF16Compressor", "bfloat16", is_floating, tf.cast)


class Compression(LossyChoices):
    """The compressors that users choose from, by Horovod's names."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
