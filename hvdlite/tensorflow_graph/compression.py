"""The compressors for TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvdlite.gradients.compression import Compressor, NoneCompressor, caster

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


def is_floating(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating)


FP16Compressor = caster("FP16Compressor", "float16", is_floating, tf.cast)
BF16Compressor = caster("BF16Compressor", "bfloat16", is_floating, tf.cast)


class Compression:
    """The compressors to choose from."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
