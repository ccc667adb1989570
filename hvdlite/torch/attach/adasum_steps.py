"""Adasum for a torch optimizer: each rank computes a step by itself, and Adasum combines the ranks' steps.

    before step():  remember the weights
    step():         the optimizer's own, with this rank's gradients
    after step():   weights = remembered + Adasum over ranks of (weights - remembered), tensor by tensor

Momentum and other state are therefore each rank's own. Adasum adds orthogonal steps, and makes one step of equal ones.
So the learning rate need not grow with the number of ranks. (Horovod combines the steps one by one during backward.)

If a rank's gradients are not finite, its step moves nothing, and others combine theirs with that (`own_steps`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.lanes.calls import calling, numbered
from hvdlite.ops import Adasum, grouped_allreduce_of_none
from hvdlite.torch.attach.own_steps import METHODS, OwnSteps
from hvdlite.torch.attach.parameters import flat
from hvdlite.torch.attach.replica_check import alike
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.attach.steps import Arguments, Options
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
        steps: The hooks around step().
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
        self.steps = OwnSteps(optimizer, self.begin, self.end)
        self.runtime.registries.renew_later(self)
        self.runtime.registries.count_in_join(self)

    @property
    def group(self) -> Group:
        """All ranks, since op=Adasum is for the global process set."""
        return self.runtime.everyone

    @property
    def alive(self) -> bool:
        """Whether the hooks combine steps."""
        return bool(self.steps.handles) and self.runtime.live

    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the parameters that a step may move: also frozen ones that have a gradient."""
        return [p for p in flat(self.optimizer.param_groups) if p.requires_grad or p.grad is not None]

    def begin(self, args: Arguments, kwargs: Options) -> None:
        """A step() begins: remember the weights."""
        runtime.require_attached(self.alive, True, least=1, lost="its steps would not be combined")
        self.starts = [(p, p.detach().clone()) for p in self.parameters()]

    def end(self, args: Arguments, kwargs: Options) -> None:
        """A step() has ended: combine the ranks' steps. Collective; waits for all ranks."""
        if self.alive:
            with calling(self.title):
                self.combine([p.detach() - start for p, start in self.starts])

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
        self.steps.remove()
        self.runtime.registries.forget(self, self.alike)


def attach_delta(optimizer: torch.optim.Optimizer, settings: TorchSettings, renewed: bool = False) -> None:
    """Attach to an optimizer, and add the methods that users call. Collective.

    Args:
        optimizer: The optimizer.
        settings: What the user asked for.
        renewed: Whether `elastic.run` attaches the optimizer again.
    """
    optimizer.__dict__.update(METHODS, _hvdlite=DeltaAttachment(optimizer, settings, renewed))
