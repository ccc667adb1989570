"""Every check in `ranks/` at every world size, each as a test; every job shuts down and exits with 0."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel import jobs

LARGEST = max(jobs.SIZES)
POWERS_OF_TWO = ("algorithms", "process_sets", "torch_adasum", "torch_process_sets")
"""Modules for which four ranks are more than two and three: two steps of halving, two sets of two. The others run on
four ranks with --full only."""


LONG = (
    "tensorflow_", "torch_attach", "torch_backwards", "torch_compression", "torch_several", "torch_sharded_",
    "torch_strategies", "torch_training",
)  # fmt: skip
"""Beginnings of the names of modules that take long. They run on other than two ranks with --full only."""
LONGEST = ("torch_sharded_long",)
"""Modules that run with --full only."""


def waits_for_full(module: str, size: int) -> bool:
    """Whether this module runs on so many ranks with --full only."""
    if module in LONGEST:
        return True
    return size != 2 if module.startswith(LONG) else size == LARGEST and module not in POWERS_OF_TWO


CASES = [
    pytest.param(
        module, size, check, id=f"{module}-{size}-{check.removeprefix('check_')}",
        marks=[pytest.mark.full] if waits_for_full(module, size) else [],
    )
    for module in jobs.modules()
    for size in jobs.sizes(module)
    for check in (*jobs.checks(module, size), jobs.END)
]  # fmt: skip


@pytest.mark.parametrize(("module", "size", "check"), CASES)
def test_ranks(module: str, size: int, check: str, request: pytest.FixtureRequest) -> None:
    items: list[Any] = request.session.items
    selected = [item.callspec.params for item in items if item.name.startswith("test_ranks[")]
    job = module.partition("_")[0]
    names = [f"{p['module']}.{p['check']}" for p in selected if p["check"] != jobs.END
             and p["size"] == size and p["module"].partition("_")[0] == job]  # fmt: skip
    result = jobs.run_checks(size, tuple(names)).get(check if check == jobs.END else f"{module}.{check}")
    if result is None:
        pytest.fail(f"not run: {jobs.MOST_JOBS} other checks failed before it", pytrace=False)
    if not (result.ended_well() if check == jobs.END else f"{module}.{check}" in result.passed()):
        pytest.fail(jobs.explain(result, check), pytrace=False)
