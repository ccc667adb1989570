"""`differentiable`: makes a function on tensors differentiable, given a second function for its gradients.

The collectives of this room call it. Autograd keeps the second function, so that one must not refer to tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import torch

Back: TypeAlias = Callable[..., Sequence[torch.Tensor]]
"""Makes the inputs' gradients from the results' gradients."""


class Context(Protocol):
    """autograd's context of one call."""

    back: Back


class Differentiable(torch.autograd.Function):
    """A function whose gradients another function makes."""

    @staticmethod
    def forward(
        ctx: Context, make: Callable[..., tuple[torch.Tensor, ...]], back: Back, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return make(*tensors)

    @staticmethod
    def backward(ctx: Context, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.back(*grads)


def differentiable(
    make: Callable[..., tuple[torch.Tensor, ...]], back: Back, tensors: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return make(*tensors), and have autograd call `back` for the gradients.

    Args:
        make: Makes the results.
        back: Called with the results' gradients; returns one gradient per tensor. Autograd keeps `back` with all that
            it refers to, so it must not refer to the tensors.
        tensors: The inputs.
    """
    return Differentiable.apply(make, back, *tensors)  # type: ignore[no-any-return, no-untyped-call]
