"""Keras on its backends: runs the checks of `ranks/backends_keras` and `ranks/backends_guards` on two ranks."""

from __future__ import annotations

from functools import cache

import pytest

from tests.parallel import jobs

BACKENDS = {"backends_keras": ("torch", "jax"), "backends_guards": ("tensorflow", "torch", "jax")}
"""The backends of each module. `ranks/tensorflow_*` has the other checks on TensorFlow."""
SMOKE = [("backends_guards", "torch"), ("backends_guards", "jax")]
"""The checks that run without --full."""


def marks(module: str, backend: str) -> list[pytest.MarkDecorator]:
    return [] if (module, backend) in SMOKE else [pytest.mark.full]


CASES = [
    pytest.param(module, backend, check, id=f"{module}-{backend}-{check}", marks=marks(module, backend))
    for module, backends in BACKENDS.items() for backend in backends for check in jobs.checks(module)
]  # fmt: skip


@cache
def job(module: str, backend: str) -> jobs.Result:
    return jobs.run(2, ["-m", "tests.parallel.runner", module], {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize(("module", "backend", "check"), CASES)
def test_keras_on(module: str, backend: str, check: str) -> None:
    result = job(module, backend)
    if f"{module}.{check}" not in result.passed():
        pytest.fail(jobs.explain(result, check), pytrace=False)


@pytest.mark.parametrize(
    ("module", "backend"),
    [pytest.param(m, b, marks=marks(m, b)) for m, backends in BACKENDS.items() for b in backends],
)
def test_keras_ends_well_on(module: str, backend: str) -> None:
    assert job(module, backend).ended_well(), job(module, backend).output
