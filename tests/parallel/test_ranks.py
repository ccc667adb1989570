"""Every check in `ranks/`, at every world size, each as its own outcome; and every job shuts down and exits with 0."""

from __future__ import annotations

import pytest

from tests.parallel import jobs

END = "end_of_job"
CASES = [
    pytest.param(module, size, check, id=f"{module}-{size}-{check.removeprefix('check_')}")
    for module in jobs.modules()
    for size in jobs.sizes(module)
    for check in (*jobs.checks(module), END)
]


@pytest.mark.parametrize(("module", "size", "check"), CASES)
def test_ranks(module: str, size: int, check: str, request: pytest.FixtureRequest) -> None:
    params = [item.callspec.params for item in request.session.items if item.name.startswith("test_ranks[")]
    selected = [p["check"] for p in params if (p["module"], p["size"]) == (module, size)]
    result = jobs.run_checks(module, size, tuple(name for name in selected if name != END))
    if check not in (result.passed() if check != END else {END} if result.ended_well() else ()):
        pytest.fail(jobs.explain(result, check), pytrace=False)
