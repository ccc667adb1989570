"""Helpers for checks of torch.distributed's backend "hvdlite": a group for each check, seeded values, agreement."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

import hvdlite as hvd
from tests.parallel.common import require_error

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*FLOATS, *WHOLE, *COMPLEX, torch.bool)


BACKEND = os.environ.get("DISTRIBUTED_BACKEND", "hvdlite")
"""gloo: to see whether a check that fails is wrong itself."""


@contextmanager
def joined(backend: str = BACKEND) -> Iterator[None]:
    """A context with torch's default group over all ranks."""
    dist.init_process_group(backend)
    try:
        yield
    finally:
        dist.destroy_process_group()


def grouped(check: Callable[[], None]) -> Callable[[], None]:
    """Run a check within `joined`."""

    @functools.wraps(check)
    def run() -> None:
        with joined():
            check()

    return run


def seeded(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A rank's values: small whole numbers, so that sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    values = torch.randint(0, 4, shape, generator=generator)
    if dtype == torch.bool:
        return values > 1
    if dtype.is_complex:
        return torch.complex(values.double(), values.double().flip(-1) if shape else -values.double()).to(dtype)
    return values.to(dtype)


def everyones(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """All ranks' `seeded` values."""
    return [seeded(rank, shape, dtype, seed) for rank in range(hvd.size())]


def require_equal(found: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Check a tensor's dtype, shape and bits."""
    assert found.dtype == expected.dtype and found.shape == expected.shape, (what, found, expected)
    same = found.view(torch.uint8).equal(expected.view(torch.uint8)) if found.dtype in FLOAT8 else found.equal(expected)
    assert same, (what, found, expected)


def require_mismatch(call: Callable[[], object], *words: str) -> None:
    """Check that every rank gets a MismatchError with these words and the same text, and the job goes on."""
    text = require_error(hvd.MismatchError, call, *words)
    assert len(set(hvd.allgather_object(text))) == 1
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert (ones == dist.get_world_size()).all()


def network(seed: int = 0) -> nn.Module:
    """A small network, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def data(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks' inputs and targets of a step: this many rows for each rank."""
    generator = torch.Generator().manual_seed(step)
    total = rows * hvd.size()
    return torch.randn(total, 6, generator=generator), torch.randn(total, 4, generator=generator)


def mine(whole: torch.Tensor) -> torch.Tensor:
    """This rank's rows."""
    return whole.chunk(hvd.size())[hvd.rank()]


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
