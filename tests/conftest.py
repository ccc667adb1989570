"""Shared by all tests: which of them run side by side, which wait for `--full`, and where the time went."""

from __future__ import annotations

import signal
from collections import defaultdict

import pytest

# A shell starts background jobs with Ctrl-C ignored, and children inherit that. Then no test could send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FEWEST_SECONDS = 5.0  # a group that took less is not listed


def group(item: pytest.Item) -> str:
    """Tests of one group run one after another in one process.

    All jobs of ranks are one group, because waiting ranks keep the cores busy. The tests of several hosts are one,
    because some look for daemons of the whole machine. Each test of the launcher is one, because these mostly wait. All
    other tests are grouped by file.
    """
    file, _, name = item.nodeid.partition("::")
    if file.startswith(("tests/parallel/test_ranks", "tests/parallel/test_keras")):
        return "1 ranks"
    if file.startswith("tests/multihost/"):
        return "2 hosts"
    return f"3 {file}::{name}" if file.startswith("tests/launcher/") else f"3 {file}"


def job(item: pytest.Item) -> str:
    """The file of a test, or its job of ranks, in the list of seconds."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    if "module" in parameters and "check" in parameters:  # rank checks of one kind and size share a job
        kind = str(parameters["module"])
        where = parameters.get("backend") or parameters.get("size")
        return f"ranks {kind if 'backend' in parameters else kind.partition('_')[0]} {where}"
    return item.nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests that are marked full, too")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a slow test, which runs with --full only")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if config.getoption("--full") or item.get_closest_marker("full") is None]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = sorted(kept, key=lambda item: group(item)[0])  # the longest group first
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group(item)))
        item.user_properties.append(("job", job(item)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of each file and each job of ranks."""
    spent: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[str(dict(report.user_properties)["job"])] += report.duration
    terminalreporter.section("where the time went")
    for name, seconds in sorted(spent.items(), key=lambda pair: -pair[1]):
        if seconds >= FEWEST_SECONDS:
            terminalreporter.line(f"{seconds:6.0f} s  {name}")
    terminalreporter.line(f"{sum(spent.values()):6.0f} s  in all, some of them side by side")
