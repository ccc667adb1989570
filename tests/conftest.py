"""Shared by all tests: which of them wait for `--full`, where the time went, and the table of what was tested."""

from __future__ import annotations

import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests import support

# A shell starts background jobs with Ctrl-C ignored, and children inherit that. Then no test could send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

FEWEST_SECONDS = 5.0  # a group that took less is not listed


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
    parser.addoption(
        "--record", metavar="FILE", type=Path, help="write what passed into this table of the documentation"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: a slow test, which runs with --full only")


def pytest_itemcollected(item: pytest.Item) -> None:
    item.user_properties.append(("job", job(item)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("full")])
        items[:] = [item for item in items if not item.get_closest_marker("full")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the seconds of each file and each job of ranks, and record what passed."""
    table = config.getoption("--record")
    if table:
        stats = terminalreporter.stats
        outcomes = [(report.nodeid, word) for word in ("passed", "failed") for report in stats.get(word, ())]
        support.record(table, support.rows(outcomes))
    spent: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                spent[str(dict(report.user_properties).get("job", "a worker that has crashed"))] += report.duration
    terminalreporter.section("where the time went")
    for name, seconds in sorted(spent.items(), key=lambda pair: -pair[1]):
        if seconds >= FEWEST_SECONDS:
            terminalreporter.line(f"{seconds:6.0f} s  {name}")
    terminalreporter.line(f"{sum(spent.values()):6.0f} s  in all")
