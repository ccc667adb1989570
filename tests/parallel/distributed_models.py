"""Small models that are trained over all ranks, and by one process with the big batch. Nothing here knows hvdlite."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor


def network(seed: int = 0, width: int = 16) -> nn.Module:
    """A small network, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))


class Block(nn.Module):
    """Two layers that are split over ranks, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.last = nn.Linear(6, 16), nn.Linear(16, 6), nn.Linear(6, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.down(torch.tanh(self.up(inputs))))
        return found


def data(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' inputs and targets of a step: this many rows for each rank."""
    generator = torch.Generator().manual_seed(step)
    total = rows * dist.get_world_size()
    return torch.randn(total, 6, generator=generator), torch.randn(total, 4, generator=generator)


def mine(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean squared error."""
    return nn.functional.mse_loss(model(inputs), targets)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 4,
    share: Callable[[torch.Tensor], torch.Tensor] = mine,
    scale: float = 1.0,
) -> None:
    """Train on each step's data. share: the rows that this rank takes. scale: a factor of the loss."""
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = map(share, data(step))
        (scale * loss_of(model, inputs, targets)).backward()
        optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The share function of a rank that takes all rows."""
    return tensor


def trained_alone(steps: int = 4, make: Callable[[], nn.Module] = network, lr: float = 0.1) -> dict[str, torch.Tensor]:
    """The weights of one process that trains with the big batch."""
    model = make()
    train(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), steps, whole)
    return model.state_dict()


def require_close(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], within: float = 1e-6, prefix: str = ""
) -> None:
    """Check that all weights are equal to within this difference."""
    assert {name.removeprefix(prefix) for name in found} == set(expected), (found.keys(), expected.keys())
    for name, value in found.items():
        away = (value.double() - expected[name.removeprefix(prefix)].double()).abs().max().item()
        assert math.isfinite(away) and away <= within, (name, away)


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.SGD:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """The model, each layer and the whole sharded."""
    for layer in model:  # type: ignore[attr-defined]
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, whole, on every rank."""
    return {name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in model.state_dict().items()}  # fmt: skip


def require_pipeline(make: type[ScheduleGPipe | Schedule1F1B]) -> None:
    """Train a network with a layer on each rank, and check that losses and weights are those of one process."""
    p, r = dist.get_world_size(), dist.get_rank()

    def layers() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p)]

    alone, layer = nn.Sequential(*layers()), layers()[r]
    stage = PipelineStage(layer, r, p, torch.device("cpu"))
    schedule = make(stage, n_microbatches=2 * p, loss_fn=nn.functional.mse_loss)
    optimizers = sgd(alone.parameters()), sgd(layer.parameters())
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        inputs, targets = (torch.randn(4 * p, 6, generator=generator) for _ in range(2))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(alone, inputs, targets)
        loss.backward()
        losses: list[torch.Tensor] = []
        if r == 0:
            schedule.step(inputs)
        elif r == p - 1:
            schedule.step(target=targets, losses=losses)
            assert torch.allclose(torch.stack(losses).mean(), loss, atol=1e-6)
        else:
            schedule.step()
        for optimizer in optimizers:
            optimizer.step()
    require_close(layer.state_dict(), alone[r].state_dict())
