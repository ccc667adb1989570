"""Collectives that autograd goes through: what makes the results, and what makes the gradients, as two functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], back: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        ctx.back = back
        return make(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(*grads)


def differentiable(
    make: Callable[..., tuple[torch.Tensor, ...]], back: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    """make(*tensors), whose gradients are back(*gradients of the results), one per tensor. Autograd keeps `back`, with
    whatever that refers to: let no input be among it."""
    return Differentiable.apply(make, back, *tensors)  # type: ignore[no-any-return, no-untyped-call]
