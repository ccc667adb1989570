"""What a chain needs of Keras' backend: Python functions inside a training step, and gradients of one part."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias, cast

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.keras.backends import name
from hvdlite.keras.chain.parts import Spec

MODULES = {"tensorflow": "hvdlite.tensorflow_graph.chain", "torch": "hvdlite.keras.chain.torch_backend"}
Work: TypeAlias = Callable[..., Sequence[Array]]
"""A function that takes arrays, and returns new ones."""


class Tape(Protocol):
    """The record of one forward pass."""

    def leaf(self, tensor: Tensor) -> Tensor:
        """Return the tensor without its history. If it is floating, its gradient can be taken."""
        ...

    def pull(self, target: Tensor, gradient: Gradient, sources: Sequence[Tensor | Variable]) -> list[Gradient]:
        """Return the sources' gradients, given that of `target` (None: 1). None for what target does not depend on."""
        ...


class Backend(Protocol):
    """A backend's functions."""

    def record(self) -> AbstractContextManager[Tape]:
        """Return a context that records what parts compute."""
        ...

    def unrecorded(self) -> AbstractContextManager[object]:
        """Return a context that records nothing, for optimizers."""
        ...

    def call(self, work: Work, tensors: Sequence[Tensor], results: Sequence[Spec]) -> list[Tensor]:
        """Call a function on the tensors' arrays, each time that the step runs; all calls of a step in their order.

        results: What the function returns, as far as it is known when TensorFlow compiles the step.
        """
        ...


def backend() -> Backend:
    """Return the functions of Keras' backend. Raises NotImplementedError unless it is TensorFlow or PyTorch."""
    found = name()
    if found not in MODULES:
        raise NotImplementedError(
            f"hvd.Chain works with Keras on TensorFlow and PyTorch, not on {found.upper()}, where a compiled step "
            "cannot exchange messages. Set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch before importing keras"
        )
    return cast(Backend, importlib.import_module(MODULES[found]))
