"""Keras on its backends: runs the checks of `ranks/backends_*` on two ranks, those of FOUR on four."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.parallel import jobs

BACKENDS = {
    "backends_keras": ("torch", "jax"),
    "backends_guards": ("tensorflow", "torch", "jax"),
    "backends_chain": ("tensorflow", "torch"),
    "backends_chain_cases": ("tensorflow", "torch"),
    "backends_columns": ("tensorflow", "torch"),
    "backends_compression": ("tensorflow", "torch", "jax"),
    "backends_helpers": ("torch", "jax"),
    "backends_sharded": ("tensorflow", "torch"),
    "backends_strategies": ("tensorflow", "torch"),
    "backends_sharded_four": ("torch",),
}
"""The backends of each module. `ranks/tensorflow_*` has the other checks on TensorFlow."""
FOUR = ("backends_columns", "backends_sharded_four")
"""The modules that run on four ranks."""
SMOKE = [("backends_guards", "torch"), ("backends_guards", "jax"), ("backends_chain", "torch"),
         ("backends_compression", "torch"), ("backends_helpers", "torch"), ("backends_sharded", "torch")]  # fmt: skip
"""The checks that run without --full. Those on one backend share a job."""


def marks(module: str, backend: str) -> list[pytest.MarkDecorator]:
    return [] if (module, backend) in SMOKE else [pytest.mark.full]


CASES = [
    pytest.param(module, backend, check, id=f"{module}-{backend}-{check}", marks=marks(module, backend))
    for module, backends in BACKENDS.items() for backend in backends for check in jobs.checks(module)
]  # fmt: skip


def job(module: str, backend: str, request: pytest.FixtureRequest) -> jobs.Result:
    """The job with a module's checks, and those of others on the same backend that have been chosen to run."""
    items: list[Any] = request.session.items
    chosen = {item.callspec.params.get("module") for item in items if item.path == request.path}
    shared = tuple(each for each, its in SMOKE if its == backend and each in chosen)
    return started(shared if module in shared else (module,), backend)


@cache
def started(modules: tuple[str, ...], backend: str) -> jobs.Result:
    size = 4 if modules[0] in FOUR else 2
    arguments = ["-m", "tests.parallel.runner", *modules]
    settings = {"HVDLITE_COMPRESS_WITHIN_HOST": "1"}  # for lossy compressors, which otherwise do nothing on one host
    return jobs.run(size, arguments, {"KERAS_BACKEND": backend, "JAX_PLATFORMS": "cpu", **settings})


@pytest.mark.parametrize(("module", "backend", "check"), CASES)
def test_keras_on(module: str, backend: str, check: str, request: pytest.FixtureRequest) -> None:
    result = job(module, backend, request)
    if f"{module}.{check}" not in result.passed():
        pytest.fail(jobs.explain(result, check), pytrace=False)


@pytest.mark.parametrize(
    ("module", "backend"),
    [pytest.param(m, b, marks=marks(m, b)) for m, backends in BACKENDS.items() for b in backends],
)
def test_keras_ends_well_on(module: str, backend: str, request: pytest.FixtureRequest) -> None:
    result = job(module, backend, request)
    assert result.ended_well(), result.output
