"""What the Keras backends PyTorch and JAX have in common: parts of a `hvdlite.gradients.framework.Framework`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext as using
from typing import Any

from hvdlite.gradients.use import Use

__all__ = ["divided", "in_order", "in_session", "refuse_replicas", "use_of", "using"]


def use_of(gradient: Any) -> Use:
    return Use.UNUSED if gradient is None else Use.DENSE


def divided(gradient: Any, divisor: int) -> Any:
    return gradient / divisor


def refuse_replicas() -> None:
    """There are none: `_attach` refuses a distribution of Keras' on every backend."""


def in_order() -> bool:
    return True  # JAX: its callbacks are ordered


def in_session(variables: Sequence[Any]) -> bool:
    return False
