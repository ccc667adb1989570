"""A model that sleeps during backward, like the CPU of a process that trains on a GPU.

It gives gradients of the same shapes at the same times as a real model. `overlap` measures with it how much of the
communication overlaps with backward if communication takes no CPU time from backward.
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
    """Return the task with a model that sleeps. Its times grow with the batch.

    Args:
        task: The task.
        arrivals: The time at which backward has each parameter's gradient, in seconds, at the task's own batch size.
    """

    def batch(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(count, 10), torch.zeros(count, dtype=torch.int64)

    def build() -> nn.Module:
        return Elsewhere(list(copy_of(task).parameters()), [arrival / task.count for arrival in arrivals])

    return replace(task, name=f"{task.name}, elsewhere", build=build, batch=batch)


class Elsewhere(nn.Module):
    """A model that returns its input, and has a gradient for each parameter after a given time.

    Attributes:
        weights: The parameters.
        arrivals: The time of each parameter's gradient, in seconds per sample since backward began.
        order: The parameters, by index, in the order of their times.
        gradients: The gradients.
        began: The time at which backward began, by `time.perf_counter`.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], arrivals: Sequence[float]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(parameters)
        self.arrivals = arrivals
        self.order = sorted(range(len(arrivals)), key=lambda index: arrivals[index])
        self.gradients = [torch.full_like(p, 1e-6) for p in parameters]
        self.began = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for index in reversed(self.order):  # backward goes in the opposite order
            inputs = Computed.apply(inputs, self.weights[index], self, index)  # type: ignore[no-untyped-call]
        return inputs

    def compute(self, index: int, samples: int) -> torch.Tensor:
        """Sleep until the gradient's time, and return it."""
        if index == self.order[0]:
            self.began = time.perf_counter()
        time.sleep(max(0.0, self.began + self.arrivals[index] * samples - time.perf_counter()))
        return self.gradients[index]


class Computed(torch.autograd.Function):
    """The identity of its first argument. The gradient of the second argument comes after a while."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, p: torch.Tensor, model: Elsewhere, index: int) -> torch.Tensor:
        ctx.model, ctx.index = model, index
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0], ctx.model.compute(ctx.index, len(grads[0])), None, None
