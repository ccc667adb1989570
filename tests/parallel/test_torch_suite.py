"""torch's own tests of torch.distributed pass on the backend "hvdlite"."""

from __future__ import annotations

import sys

import pytest

from tests.parallel import jobs


def suite(seconds: float, *options: str) -> jobs.Result:
    return jobs.finished([sys.executable, "-m", "tests.torch_suite", *options], jobs.environment({}), seconds)


def test_fast_part() -> None:
    result = suite(200, "--fast")
    assert result.code == 0, result.output


@pytest.mark.full
def test_all() -> None:
    """What passes on gloo passes on hvdlite, but for a list of exceptions. Nothing hangs."""
    result = suite(1200)
    assert result.code == 0, result.output
