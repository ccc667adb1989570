"""Helpers for checks of torch.distributed's backend "hvdlite": a group for each check, seeded values, agreement."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

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
