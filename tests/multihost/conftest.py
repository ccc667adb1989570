"""One pair of hosts for all tests of this folder, or one line that says why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner, available
from tests.multihost.hosts import Hosts, hosts, missing


@pytest.fixture(scope="session", autouse=True)
def _possible() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """hosta and hostb. Both see pytest's temporary folders."""
    with hosts(2, shared=[tmp_path_factory.getbasetemp()]) as found:
        yield found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runner" in metafunc.fixturenames and not hasattr(metafunc.module, "runner"):
        mpis = available() if missing() is None else []
        metafunc.parametrize("runner", mpis, ids=[mpi.family.name.lower() for mpi in mpis], indirect=True)


@pytest.fixture
def runner(request: pytest.FixtureRequest, pair: Hosts) -> Iterator[Runner]:
    """Runs hvdliterun on hosta, with one of the MPIs."""
    runner = Runner(request.param, Path("/tmp"), prefix=pair[0].command([]))
    yield runner
    for pid in runner.leftovers():
        os.kill(pid, 9)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if "multihost" in report.nodeid]
    if skipped:
        terminalreporter.section("NOT ALL TESTS RAN ON SEVERAL HOSTS", red=True)
        reasons = {str(report.longrepr[2]) for report in skipped if isinstance(report.longrepr, tuple)}
        terminalreporter.line(f"{len(skipped)} tests were skipped: {'; '.join(sorted(reasons))}")
