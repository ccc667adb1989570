"""The hooks around step() of an optimizer whose gradients may stay this rank's own.

A torch.amp.GradScaler skips the step of a rank whose gradients are not finite. Such a rank would then fall behind the
other ranks by a step. hvdlite therefore declares to the scaler that the optimizer divides by the scale itself. The
scaler then always calls step(), and on such a rank that step moves no parameter.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.steps import Arguments, Options
from hvdlite.torch.private_api import SCALES, step_is_nested, without_step_hooks

Changed: TypeAlias = tuple[Arguments, Options] | None
"""Other arguments for step(), or None."""


class OwnSteps:
    """The hooks around one optimizer's step().

    Attributes:
        reference: The optimizer, held weakly.
        begin: Called with the arguments of each step before it; may return others. Gradients are unscaled then.
        end: Called with them after each step, unless it has raised.
        scales: Whether hvdlite divides gradients by a GradScaler's scale. Fused optimizers do it themselves.
        scaler_waits: Whether a GradScaler has called step(), and will delete attributes that it has set.
        handles: torch's handles of the hooks; empty once they are removed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        begin: Callable[[Arguments, Options], Changed],
        end: Callable[[Arguments, Options], None],
    ) -> None:
        self.reference, self.begin, self.end = weakref.ref(optimizer), begin, end
        self.scales = not getattr(optimizer, SCALES, False)
        if self.scales:
            setattr(optimizer, SCALES, True)
        self.scaler_waits = False
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self.before_step), optimizer.register_step_post_hook(self.after_step)
        ]  # fmt: skip

    def before_step(self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options) -> Changed:
        """A step() begins.

        Returns:
            Other arguments for step(), if it is to move no parameter, or `begin` wants others.
        """
        if step_is_nested(optimizer):
            return None
        found_inf, scale = self.take_scaling(optimizer) if self.scales else (None, None)
        skips = found_inf is not None and bool(found_inf)
        if scale is not None and not skips:
            for p in flat(optimizer.param_groups):
                if p.grad is not None:
                    p.grad.mul_(1 / float(scale))
        changed = self.begin(args, kwargs)
        return ((without_parameters(optimizer), *args[1:]), kwargs) if skips else changed

    def take_scaling(self, optimizer: torch.optim.Optimizer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Remove the attributes that a GradScaler has set, since the optimizer's own step() refuses them.

        Returns:
            Whether gradients are not finite; and the scale, or None after `unscale_`. Both are None without a scaler.
        """
        values = optimizer.__dict__
        self.scaler_waits = "found_inf" in values
        return values.pop("found_inf", None), values.pop("grad_scale", None)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options) -> None:
        """A step() has ended."""
        if step_is_nested(optimizer):
            return
        if self.scaler_waits:
            optimizer.__dict__.update(found_inf=None, grad_scale=None)
        self.end(args, kwargs)

    def remove(self) -> None:
        """Remove the hooks."""
        optimizer = self.reference()
        if self.scales and optimizer is not None:
            optimizer.__dict__.pop(SCALES, None)
        for handle in self.handles:
            handle.remove()
        self.handles = []


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a twin of an optimizer whose step() changes no parameter, gradient or state, and calls no hooks."""
    twin = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin.__dict__.update(optimizer.__dict__, param_groups=groups, **without_step_hooks())
    return twin


def skip_synchronize() -> NoReturn:
    """Raise AssertionError: it would promise that step() does not communicate."""
    raise AssertionError(
        "skip_synchronize() is not possible with op=Adasum or strategy=: gradients stay this rank's own, and step() "
        "brings the ranks together"
    )


METHODS: Mapping[str, Callable[..., object]] = {
    "synchronize": lambda: None,
    "skip_synchronize": skip_synchronize,
    "no_sync": contextlib.nullcontext,  # gradients accumulate on each rank anyway
    "set_backward_passes_per_step": lambda passes: None,
}
"""The methods that the optimizer gains. Gradients stay this rank's own, so there is nothing to synchronize."""
