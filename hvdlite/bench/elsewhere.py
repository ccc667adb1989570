"""A stand-in for a model whose backward runs elsewhere, as on a GPU: the same gradients at the same times, while the
CPU sleeps. It shows how much is hidden if communication takes no CPU time from backward.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hvdlite.bench.tasks import Task, copy_of


def elsewhere(task: Task, arrivals: Sequence[float]) -> Task:
    """The task with such a model; its times grow with the batch.

    arrivals: when backward has the gradient of each parameter at the task's own batch size, in seconds.
    """

    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 10), torch.zeros(count, dtype=torch.int64)

    def build() -> nn.Module:
        return Elsewhere(list(copy_of(task).parameters()), [arrival / task.count for arrival in arrivals])

    return replace(task, name=f"{task.name}, elsewhere", build=build, batch=batch)


class Elsewhere(nn.Module):
    """arrivals: of the parameters' gradients, in seconds per sample since backward began."""

    def __init__(self, parameters: Sequence[nn.Parameter], arrivals: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)
        self.arrivals = arrivals
        self.order = sorted(range(len(arrivals)), key=lambda index: arrivals[index])
        self.gradients = [torch.full_like(p, 1e-6) for p in parameters]
        self.began = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for index in reversed(self.order):  # what comes last in forward is first in backward
            inputs = Computed.apply(inputs, self.weights[index], self, index)  # type: ignore[no-untyped-call]
        return inputs

    def compute(self, index: int, samples: int) -> torch.Tensor:
        """A gradient, once its time has come."""
        if index == self.order[0]:
            self.began = time.perf_counter()
        time.sleep(max(0.0, self.began + self.arrivals[index] * samples - time.perf_counter()))
        return self.gradients[index]


class Computed(torch.autograd.Function):
    """The identity of its first argument; the second one's gradient comes after a while."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, p: torch.Tensor, model: Elsewhere, index: int) -> torch.Tensor:
        ctx.model, ctx.index = model, index
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], ctx.model.compute(ctx.index, len(grads[0])), None, None
