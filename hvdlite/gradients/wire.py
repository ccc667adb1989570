"""How a gradient travels: its dtype on the wire, the compressor, and the compressor's context.

    pack(gradients)      before the reduction: what is sent, and a context for each gradient
    restore(result, i)   after it: the result as the variable's gradient

A round has a `Packed` of its own, so a compressor without state needs nothing else. A compressor with state (error
feedback, say) keeps it by variable; `Packed` is where it learns which variable a gradient belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.gradients.compression import Compressor, unknown, wire_of
from hvdlite.gradients.framework import Framework
from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.use import Use


def dtype_on_wire(compression: type[Compressor], dtype: str, floating: bool) -> str:
    """The dtype in which a gradient travels, unless the compressor is a user's own.

    Args:
        compression: The compressor.
        dtype: The gradient's own dtype, by name.
        floating: Whether it is a floating-point gradient.
    """
    wire = wire_of(compression)
    return wire if wire is not None and floating else dtype


def dtype_name(variable: Variable) -> str:
    """The name of a variable's dtype."""
    dtype = getattr(variable.dtype, "base_dtype", variable.dtype)  # TF1's reference variables have their own
    return str(getattr(dtype, "name", dtype))


@dataclass(frozen=True)
class Wire:
    """How one optimizer's gradients travel.

    Attributes:
        compression: The compressor.
        framework: What the tensors belong to.
    """

    compression: type[Compressor]
    framework: Framework

    def pack(self, gradients: Sequence[Gradient]) -> Packed:
        """Compress dense gradients; sparse ones travel as they are."""
        contexts: list[object] = [None] * len(gradients)
        small = list(gradients)
        for index, gradient in enumerate(gradients):
            if gradient is not None and self.framework.use_of(gradient) is Use.DENSE:
                small[index], contexts[index] = self.compression.compress(gradient)
        return Packed(self, small, contexts)

    def dtype(self, gradient: Gradient, variable: Variable) -> str:
        """The dtype of what is sent for a variable, or would be. gradient: as packed; None where there is none."""
        if gradient is not None:
            return self.framework.dtype_of(gradient)
        dtype = dtype_name(variable)
        if unknown(self.compression):
            small, _ = self.compression.compress(self.framework.zeros((1,), dtype))
            return self.framework.dtype_of(small)
        return dtype_on_wire(self.compression, dtype, "float" in dtype)

    def context_of_zeros(self, variable: Variable) -> object:
        """The compressor's context for a variable that has a gradient on other ranks only."""
        shape = tuple(map(int, variable.shape))
        return self.compression.compress(self.framework.zeros(shape, dtype_name(variable)))[1]


@dataclass(frozen=True)
class Packed:
    """One round's gradients, ready to be sent.

    Attributes:
        wire: How they travel.
        gradients: What is sent for each variable; None where this rank has no gradient.
        contexts: The compressor's contexts, by the same index.
    """

    wire: Wire
    gradients: list[Gradient]
    contexts: list[object]

    def restore(self, result: Gradient, index: int, variable: Variable) -> Gradient:
        """A result of the reduction as the variable's gradient."""
        if result is None or self.wire.framework.use_of(result) is not Use.DENSE:
            return result
        context = self.contexts[index]
        if self.gradients[index] is None:
            context = self.wire.context_of_zeros(variable)
        return self.wire.compression.decompress(result, context)
