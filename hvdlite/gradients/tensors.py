"""Types for tensors and variables of all frameworks: `gradients/` knows their shapes, dtypes and names.

For everything else it asks the `Framework`. Arrays of NumPy and CuPy also satisfy `Tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias


class Tensor(Protocol):
    """A tensor of TensorFlow, PyTorch or JAX, dense or sparse."""

    @property
    def shape(self) -> Sequence[int]:
        """The dimensions."""
        ...

    @property
    def dtype(self) -> object:
        """The dtype, in the framework's own terms."""
        ...


Gradient: TypeAlias = "Tensor | None"
"""A variable's gradient; None if it has no gradient."""


class Variable(Tensor, Protocol):
    """A variable of Keras or TensorFlow. Keras variables also have a `path`, which is longer than the name."""

    @property
    def name(self) -> str:
        """The name. Keras may have added a number."""
        ...

    def assign(self, value: Tensor) -> object:
        """Give the variable another value."""
        ...
