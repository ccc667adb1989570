"""Adasum for a torch optimizer: each rank steps by itself, and the steps are combined, not the gradients.

    before step():  remember the weights
    step():         the optimizer's own, with this rank's gradients
    after step():   weights = remembered + Adasum over ranks of (weights - remembered), tensor by tensor

So momentum and the like are each rank's own, and the combined step needs no larger learning rate: where ranks' steps
are orthogonal they add up, where they are equal one is taken. (Horovod does the same in backward, one by one.)

A torch.amp.GradScaler leaves out the steps of a rank whose gradients are not finite, and the others would be combined
with a later one. So optimizers say that they scale by themselves: such a rank steps, too, with no parameters.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.calls import calling, numbered
from hvdlite.ops import Adasum, grouped_allreduce_
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.replica_check import alike
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.private_api import SCALES, names_of_step_hooks, step_is_nested
from hvdlite.torch.reductions import grouped_allreduce


class DeltaAttachment:
    """One optimizer whose steps are combined."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: Settings, compression: Any, renewed: bool = False
    ) -> None:
        self.optimizer, self.settings = optimizer, settings
        self.compression = compression
        self.runtime = runtime.current()
        number = self.group.serial("optimizer")
        self.name = f"optimizer.{number} steps"
        self.title = numbered(f"step() of DistributedOptimizer({type(optimizer).__name__}, op=Adasum)", number)
        self.alike = alike(optimizer, settings.names, settings.replica_check, state=False)
        self.alike.enter(self.group.eager, self.name)
        self.alike.agree()
        self.starts: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What a step may move, and where it was."""
        self.renewed = renewed
        self.scales = not getattr(optimizer, SCALES, False)
        """In place of a GradScaler; fused optimizers do anyway."""
        if self.scales:
            setattr(optimizer, SCALES, True)
        self.scaler_waits = False
        """A GradScaler has called step(), and will delete what it has set on the optimizer."""
        self.hooks: list[Any] = [
            optimizer.register_step_pre_hook(self.before_step), optimizer.register_step_post_hook(self.after_step)
        ]  # fmt: skip
        self.runtime.renewables.append(self)
        self.runtime.after_join.append(self)

    @property
    def group(self) -> Group:
        """All ranks: op=Adasum is for the global process set."""
        return self.runtime.everyone

    @property
    def alive(self) -> bool:
        return bool(self.hooks) and self.runtime.live

    def parameters(self) -> Sequence[torch.Tensor]:
        """What a step may move: frozen ones, too, that have a gradient."""
        return [p for p in flat(self.optimizer.param_groups) if p.requires_grad or p.grad is not None]

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Remember the weights. Returns other arguments for the step where it is to move none."""
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
        """What a GradScaler has set, which the optimizer's own step refuses: whether gradients are not finite, and the
        scale, None where `unscale_` has been called."""
        values = self.optimizer.__dict__
        self.scaler_waits = "found_inf" in values
        return values.pop("found_inf", None), values.pop("grad_scale", None)

    def after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Combine the steps. Collective; waits for all ranks."""
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
        """Move the parameters by the ranks' combined steps. deltas: this rank's. Waits for all ranks."""
        if deltas:
            combined = grouped_allreduce(deltas, name=self.name, compression=self.compression, op=Adasum)
            for (p, start), delta in zip(self.starts, combined, strict=True):
                p.data.copy_(start + delta)
        else:  # the others have none either, or all are told
            grouped_allreduce_([], Adasum, self.name, or_none=True)
        self.starts = []
        self.alike.look()

    def renew(self) -> None:
        """Attach the same optimizer again, in the same way, under the present runtime."""
        self.detach()
        attach_delta(self.optimizer, self.settings, self.compression, renewed=True)

    def give_up(self) -> None:
        """This rank is about to join. Nothing is under way between steps."""

    def start_over(self) -> None:
        """All ranks have joined."""
        self.alike.expect()

    def detach(self) -> None:
        """Take the hooks off."""
        if self.scales:
            self.optimizer.__dict__.pop(SCALES, None)
        self.runtime.renewables.remove(self)
        self.runtime.last_looks.remove(self.alike)
        self.runtime.after_join.remove(self)
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same optimizer, whose step does nothing to parameters, gradients and state, and calls no hooks."""
    twin = object.__new__(type(optimizer))
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    no_hooks = {name: OrderedDict[int, Any]() for name in names_of_step_hooks()}
    twin.__dict__.update(optimizer.__dict__, param_groups=groups, **no_hooks)
    return twin


def skip_synchronize() -> NoReturn:
    raise AssertionError("skip_synchronize() is not possible with op=Adasum: step() combines the ranks' steps")


METHODS: dict[str, Callable[..., Any]] = {
    "synchronize": lambda: None,
    "skip_synchronize": skip_synchronize,
    "no_sync": contextlib.nullcontext,  # gradients accumulate locally anyway
    "set_backward_passes_per_step": lambda passes: None,
}
"""What users call on the optimizer. Gradients stay this rank's own, so there is nothing to synchronize."""


def attach_delta(
    optimizer: torch.optim.Optimizer, settings: Settings, compression: Any, renewed: bool = False
) -> None:
    """Attach to the optimizer, and give it the methods that users call."""
    optimizer.__dict__.update(METHODS, _hvdlite=DeltaAttachment(optimizer, settings, compression, renewed))
