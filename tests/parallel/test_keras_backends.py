"""Keras on its other backends: the checks of `ranks/backends_keras`, with two ranks each."""

from __future__ import annotations

from functools import cache

import pytest

from tests.parallel import jobs

MODULE = "backends_keras"


@cache
def job(backend: str) -> jobs.Result:
    return jobs.run(2, ["-m", "tests.parallel.runner", MODULE], {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize("check", jobs.checks(MODULE))
@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_on(backend: str, check: str) -> None:
    result = job(backend)
    if f"{MODULE}.{check}" not in result.passed():
        pytest.fail(jobs.explain(result, check), pytrace=False)


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_keras_ends_well_on(backend: str) -> None:
    assert job(backend).ended_well(), job(backend).output
