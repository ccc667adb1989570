"""Adasum for a torch optimizer: each rank computes a step by itself, and Adasum combines the ranks' steps.

    before step():  remember the weights
    step():         the optimizer's own, with this rank's gradients
    after step():   weights = remembered + Adasum over ranks of (weights - remembered), tensor by tensor

Momentum and other state are therefore each rank's own. Adasum adds orthogonal steps, and makes one step of equal ones.
So the learning rate need not grow with the number of ranks. (Horovod combines the steps one by one during backward.)

A torch.amp.GradScaler skips the step of a rank whose gradients are not finite. The other ranks' steps would then be
combined with a later step of that rank. hvdlite therefore declares to the scaler that the optimizer divides by the
scale itself. The scaler then always calls step(), and on such a rank that step moves no parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch.utils.hooks import RemovableHandle

from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.calls import calling, numbered
from hvdlite.ops import Adasum, grouped_allreduce_of_none
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.replica_check import alike
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.attach.steps import Arguments, Options
from hvdlite.torch.private_api import SCALES, step_is_nested, without_step_hooks
from hvdlite.torch.reductions import grouped_allreduce


class DeltaAttachment:
    """An attachment to one optimizer that combines the ranks' steps.

    Attributes:
        optimizer: The optimizer.
        settings: What the user asked for.
        runtime: The runtime that the optimizer was attached under.
        name: The name of the operation that combines the steps.
        title: The optimizer's step() in messages.
        alike: The comparison of the ranks' weights.
        starts: During a step(): the parameters that the step may move, and their values before it.
        renewed: Whether `elastic.run` attached the optimizer again.
        scales: Whether hvdlite divides gradients by a GradScaler's scale. Fused optimizers do it themselves.
        scaler_waits: Whether a GradScaler has called step(), and will delete attributes that it has set.
        hooks: torch's handles of the hooks around step(); empty once it is detached.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: TorchSettings, renewed: bool = False) -> None:
        self.optimizer, self.settings = optimizer, settings
        self.runtime = runtime.current()
        number = self.group.serial("optimizer")
        self.name = f"optimizer.{number} steps"
        self.title = numbered(f"step() of DistributedOptimizer({type(optimizer).__name__}, op=Adasum)", number)
        self.alike = alike(optimizer, settings, state=False)
        self.alike.enter(self.group.eager, self.name)
        self.alike.agree()
        self.starts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.renewed = renewed
        self.scales = not getattr(optimizer, SCALES, False)
        if self.scales:
            setattr(optimizer, SCALES, True)
        self.scaler_waits = False
        self.hooks: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self.before_step), optimizer.register_step_post_hook(self.after_step)
        ]  # fmt: skip
        self.runtime.registries.renew_later(self)
        self.runtime.registries.count_in_join(self)

    @property
    def group(self) -> Group:
        """All ranks, since op=Adasum is for the global process set."""
        return self.runtime.everyone

    @property
    def alive(self) -> bool:
        """Whether the hooks combine steps."""
        return bool(self.hooks) and self.runtime.live

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that a step may move: also frozen ones that have a gradient."""
        return [p for p in flat(self.optimizer.param_groups) if p.requires_grad or p.grad is not None]

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options
    ) -> tuple[Arguments, Options] | None:
        """A step() begins: remember the weights.

        Returns:
            Other arguments for step(), if it is to move no parameter.
        """
        if step_is_nested(optimizer):
            return None
        found_inf, scale = self.take_scaling() if self.scales else (None, None)
        runtime.require_attached(self.alive, True, least=1, lost="its steps would not be combined")
        self.starts = [(p, p.detach().clone()) for p in self.parameters()]
        if found_inf is not None and bool(found_inf):
            return (without_parameters(optimizer), *args[1:]), kwargs
        if scale is not None:
            for p, _ in self.starts:
                if p.grad is not None:
                    p.grad.mul_(1 / float(scale))
        return None

    def take_scaling(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Remove the attributes that a GradScaler has set, since the optimizer's own step() refuses them.

        Returns:
            Whether gradients are not finite; and the scale, or None after `unscale_`. Both are None without a scaler.
        """
        values = self.optimizer.__dict__
        self.scaler_waits = "found_inf" in values
        return values.pop("found_inf", None), values.pop("grad_scale", None)

    def after_step(self, optimizer: torch.optim.Optimizer, args: Arguments, kwargs: Options) -> None:
        """A step() has ended: combine the ranks' steps. Collective; waits for all ranks."""
        if step_is_nested(optimizer):
            return
        if self.scaler_waits:
            optimizer.__dict__.update(found_inf=None, grad_scale=None)
        if not self.alive:
            return
        deltas = [p.detach() - start for p, start in self.starts]
        with calling(self.title):
            self.combine(deltas)

    def combine(self, deltas: Sequence[torch.Tensor]) -> None:
        """Move the parameters by the ranks' combined steps. Waits for all ranks. deltas: this rank's steps."""
        if deltas:
            compression = self.settings.compression
            combined = grouped_allreduce(deltas, name=self.name, compression=compression, op=Adasum)
            for (p, start), delta in zip(self.starts, combined, strict=True):
                p.data.copy_(start + delta)
        else:  # if another rank has steps to combine, all ranks raise MismatchError
            grouped_allreduce_of_none(self.name)
        self.starts = []
        self.alike.look()

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime. Collective."""
        self.detach()
        attach_delta(self.optimizer, self.settings, renewed=True)

    def give_up(self) -> None:
        """This rank is about to join. Between steps no operation is under way."""

    def start_over(self) -> None:
        """All ranks have joined: compare the weights as at the beginning."""
        self.alike.expect()

    def detach(self) -> None:
        """Remove the hooks."""
        if self.scales:
            self.optimizer.__dict__.pop(SCALES, None)
        self.runtime.registries.forget(self, self.alike)
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a twin of an optimizer whose step() changes no parameter, gradient or state, and calls no hooks."""
    twin = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    twin.__dict__.update(optimizer.__dict__, param_groups=groups, **without_step_hooks())
    return twin


def skip_synchronize() -> NoReturn:
    """Raise AssertionError: steps are always combined."""
    raise AssertionError("skip_synchronize() is not possible with op=Adasum: step() combines the ranks' steps")


METHODS: Mapping[str, Callable[..., object]] = {
    "synchronize": lambda: None,
    "skip_synchronize": skip_synchronize,
    "no_sync": contextlib.nullcontext,  # gradients accumulate on each rank anyway
    "set_backward_passes_per_step": lambda passes: None,
}
"""The methods that the optimizer gains. Gradients stay this rank's own, so there is nothing to synchronize."""


def attach_delta(optimizer: torch.optim.Optimizer, settings: TorchSettings, renewed: bool = False) -> None:
    """Attach to an optimizer, and add the methods that users call. Collective.

    Args:
        optimizer: The optimizer.
        settings: What the user asked for.
        renewed: Whether `elastic.run` attaches the optimizer again.
    """
    optimizer.__dict__.update(METHODS, _hvdlite=DeltaAttachment(optimizer, settings, renewed))
