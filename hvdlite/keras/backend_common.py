"""The functions that the backends PyTorch and JAX share: parts of a `hvdlite.gradients.framework.Framework`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext as using
from typing import Protocol, Self, TypeVar

from hvdlite.gradients.tensors import Gradient, Variable
from hvdlite.gradients.use import Use

__all__ = ["divided", "in_order", "in_session", "refuse_replicas", "use_of", "using"]


class Divisible(Protocol):
    """A dense tensor of PyTorch or JAX."""

    def __truediv__(self, divisor: int, /) -> Self:
        """Return a new tensor."""
        ...


DivisibleT = TypeVar("DivisibleT", bound=Divisible)


def use_of(gradient: Gradient) -> Use:
    """Return DENSE for every gradient: neither backend gives `gradients/` a sparse one."""
    return Use.UNUSED if gradient is None else Use.DENSE


def divided(gradient: DivisibleT, divisor: int) -> DivisibleT:
    return gradient / divisor


def refuse_replicas() -> None:
    """Do nothing: `attachment.refuse_distribution` raises for Keras' distribution on every backend."""


def in_order() -> bool:
    """Return True: PyTorch computes eagerly, and JAX orders its callbacks."""
    return True


def in_session(variables: Sequence[Variable]) -> bool:
    """Return False: only TensorFlow has sessions."""
    return False
