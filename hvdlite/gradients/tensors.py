"""What `gradients/` knows of a framework's tensors and variables: their shapes, their dtypes, and names.

Everything else is asked of the `Framework`. The arrays of the core (NumPy or CuPy) satisfy `Tensor`, too.
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
"""A variable's gradient; None where it has none."""


class Variable(Tensor, Protocol):
    """A variable of Keras or TensorFlow. Those of Keras also have a `path`, which is longer than the name."""

    @property
    def name(self) -> str:
        """The name, which Keras may have numbered."""
        ...

    def assign(self, value: Tensor) -> object:
        """Give the variable another value."""
        ...
