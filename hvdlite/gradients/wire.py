"""The wire: compresses gradients before a round, and decompresses the results after it.

    pack(gradients)      before the round: the tensors to send, and the compressor's context for each
    restore(result, i)   after the round: the result as the variable's gradient

`lists.Gradients` calls both around an exchange's round. PyTorch, with gradients that come one by one, does the same in
`torch/attach/gradients.py`. Each round has a `Packed` object, which keeps the contexts: a compressor without state
needs nothing else. A compressor with state keeps it by variable: `Packed` knows the variable of each gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.gradients.compression import Compressor, unknown, wire_of
from hvdlite.gradients.framework import Framework
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.use import Use


def dtype_on_wire(compression: type[Compressor], dtype: str, floating: bool) -> str:
    """The dtype of a gradient on the wire, by name, for hvdlite's own compressors.

    Args:
        compression: The compressor.
        dtype: The gradient's own dtype, by name.
        floating: Whether the dtype is a floating-point one.
    """
    wire = wire_of(compression)
    return wire if wire is not None and floating else dtype


def dtype_name(variable: Variable) -> str:
    """The name of a variable's dtype."""
    dtype = getattr(variable.dtype, "base_dtype", variable.dtype)  # TF1's reference variables have a dtype around it
    return str(getattr(dtype, "name", dtype))


@dataclass(frozen=True)
class Wire:
    """The compression of one optimizer's gradients.

    Attributes:
        compression: The compressor.
        framework: The gradients' framework.
    """

    compression: type[Compressor]
    framework: Framework

    def pack(self, gradients: Sequence[Gradient]) -> Packed:
        """Compress dense gradients. Sparse gradients travel unchanged."""
        contexts: list[object] = [None] * len(gradients)
        small = list(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is not None and self.framework.use_of(gradient) is Use.DENSE:
                small[index], contexts[index] = self.compression.compress(gradient)
        return Packed(self, small, contexts)

    def dtype(self, gradient: Gradient, variable: Variable) -> str:
        """The dtype in which a variable's gradients travel. gradient: the packed one; None if there is none."""
        if gradient is not None:
            return self.framework.dtype_of(gradient)
        dtype = dtype_name(variable)
        if unknown(self.compression):
            small, _ = self.compression.compress(self.framework.zeros((1,), dtype))
            return self.framework.dtype_of(small)
        return dtype_on_wire(self.compression, dtype, "float" in dtype)

    def context_of_zeros(self, variable: Variable) -> object:
        """The compressor's context for a variable with a gradient on other ranks only."""
        shape = tuple(map(int, variable.shape))
        return self.compression.compress(self.framework.zeros(shape, dtype_name(variable)))[1]


@dataclass(frozen=True)
class Packed:
    """The gradients of one round, ready to be sent.

    Attributes:
        wire: The compression.
        gradients: The tensor to send for each variable; None if this rank has no gradient.
        contexts: The compressor's context for each variable.
    """

    wire: Wire
    gradients: list[Gradient]
    contexts: list[object]

    def restore(self, result: Gradient, index: int, variable: Variable) -> Gradient:
        """Decompress a result of the reduction to the variable's gradient. index: of the variable."""
        if result is None or self.wire.framework.use_of(result) is not Use.DENSE:
            return result
        context = self.contexts[index]
        if self.gradients[index] is None:
            context = self.wire.context_of_zeros(variable)
        return self.wire.compression.decompress(result, context)
