"""Every check in `ranks/` at every world size, each as a test; every job shuts down and exits with 0."""

from __future__ import annotations

import pytest

from tests.parallel import jobs

CASES = [
    pytest.param(module, size, check, id=f"{module}-{size}-{check.removeprefix('check_')}")
    for module in jobs.modules()
    for size in jobs.sizes(module)
    for check in (*jobs.checks(module), jobs.END)
]


@pytest.mark.parametrize(("module", "size", "check"), CASES)
def test_ranks(module: str, size: int, check: str, request: pytest.FixtureRequest) -> None:
    selected = [item.callspec.params for item in request.session.items if item.name.startswith("test_ranks[")]
    job = module.partition("_")[0]
    names = [f"{p['module']}.{p['check']}" for p in selected if p["check"] != jobs.END
             and p["size"] == size and p["module"].partition("_")[0] == job]  # fmt: skip
    result = jobs.run_checks(size, tuple(names)).get(check if check == jobs.END else f"{module}.{check}")
    if result is None:
        pytest.fail(f"not run: {jobs.MOST_JOBS} other checks failed before it", pytrace=False)
    if not (result.ended_well() if check == jobs.END else f"{module}.{check}" in result.passed()):
        pytest.fail(jobs.explain(result, check), pytrace=False)
