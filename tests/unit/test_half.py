"""Conversions between float16 and float32 have NumPy's bits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hvdlite.algorithms import half

ALL = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
WIDE = ALL.astype(np.float32)
NUMBERS = np.sort(ALL[np.isfinite(ALL)].astype(np.float32))
MIDDLES = ((NUMBERS[1:].astype(np.float64) + NUMBERS[:-1]) / 2).astype(np.float32)  # exact
INFINITY = np.float32(np.inf)


@pytest.fixture(params=["usual", "flushing"])
def flushing(request: pytest.FixtureRequest) -> Iterator[None]:
    """The floating-point environment as it is, and with subnormal numbers as zeros, as in TensorFlow's threads."""
    torch = pytest.importorskip("torch")
    if request.param == "flushing" and not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers to zero")
    with np.errstate(all="ignore"):
        yield
    torch.set_flush_denormal(False)


def test_every_number_is_widened(flushing: None) -> None:
    np.testing.assert_array_equal(half.widened(ALL).view(np.uint32), WIDE.view(np.uint32))


def test_every_number_is_narrowed(flushing: None) -> None:
    found = np.empty(ALL.shape, np.float16)
    half.narrow(WIDE, found)
    np.testing.assert_array_equal(found.view(np.uint16), ALL.view(np.uint16))


@pytest.mark.parametrize("floats", [
    ALL.astype(np.float32), MIDDLES, np.nextafter(MIDDLES, INFINITY), np.nextafter(MIDDLES, -INFINITY),
    np.array([65504, 65519.99, 65520, 65536, -1e30, 3e38, INFINITY, -INFINITY, np.nan, 1e-45, -1e-45], np.float32),
    np.random.default_rng(0).integers(0, 1 << 32, 1 << 20, np.uint32).view(np.float32), np.zeros(0, np.float32),
], ids=["its own", "ties", "above ties", "below ties", "at the ends", "any bits", "none"])  # fmt: skip
def test_rounding(floats: np.ndarray) -> None:
    found = np.empty(floats.shape, np.float16)
    with np.errstate(all="ignore"):
        half.narrow(floats, found)
        expected = floats.astype(np.float16)
    np.testing.assert_array_equal(found.view(np.uint16), expected.view(np.uint16))
