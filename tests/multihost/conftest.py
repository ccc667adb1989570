"""One pair of hosts for all tests of this folder, or one clear line why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.multihost.hosts import Hosts, hosts, missing


@pytest.fixture(scope="session", autouse=True)
def _possible() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """hosta and hostb, which both see pytest's temporary folders."""
    with hosts(2, shared=[tmp_path_factory.getbasetemp()]) as found:
        yield found


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if "multihost" in report.nodeid]
    if skipped:
        terminalreporter.section("NO TEST RAN ON SEVERAL HOSTS", red=True)
        terminalreporter.line(f"{len(skipped)} tests were skipped: {missing()}")
