"""The compressors for torch tensors."""

from __future__ import annotations

import torch

from hvdlite.gradients.compression import Compressor, LossyChoices, NoneCompressor, caster

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]

FP16Compressor = caster("FP16Compressor", "float16", torch.is_floating_point, torch.Tensor.to, torch.float16)
BF16Compressor = caster("BF16Compressor", "bfloat16", torch.is_floating_point, torch.Tensor.to, torch.bfloat16)


class Compression(LossyChoices):
    """The compressors to choose from.

    Attributes:
        none: Tensors travel as they are.
        fp16: Floating-point tensors travel as float16.
        bf16: Floating-point tensors travel as bfloat16.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
