"""The models that the benchmarks train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from hvdlite.bench import models


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        name: The name in tables.
        build: Makes the model.
        batch: Makes inputs and labels for a number of samples.
        count: The usual number of samples.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    count: int


def mlp() -> nn.Module:
    """10.5 million parameters in few large tensors."""
    return nn.Sequential(
        nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
        nn.Linear(2048, 10),
    )  # fmt: skip


def cnn() -> nn.Module:
    """8 convolutions, few parameters, much arithmetic."""
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate([(3, 16), (16, 16), (16, 32), (32, 32), (32, 64), (64, 64), (64, 64)]):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, stride=1 + index % 2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def transformer() -> nn.Module:
    """6 encoder layers of width 256: 4.7 million parameters in 74 tensors."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(32 * 256, 10))


def classes(count: int) -> torch.Tensor:
    return torch.randint(0, 10, (count,))


TASKS = {
    "mlp": Task("MLP", mlp, lambda count: (torch.randn(count, 1024), classes(count)), 32),
    "cnn": Task("CNN, 8 layers", cnn, lambda count: (torch.randn(count, 3, 48, 48), classes(count)), 16),
    "transformer": Task("transformer", transformer, lambda count: (torch.randn(count, 32, 256), classes(count)), 4),
    "resnet50": Task("ResNet-50", models.resnet50, lambda count: (torch.randn(count, 3, 224, 224), classes(count)), 64),
    "gpt2": Task("GPT-2, 124 M", models.gpt2, lambda count: (torch.randint(0, 50257, (count, 512)), classes(count)), 8),
}


def copy_of(task: Task) -> nn.Module:
    """Make the model, with the same weights on every rank and in every copy."""
    torch.manual_seed(0)
    return task.build()
