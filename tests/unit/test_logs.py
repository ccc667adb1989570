"""The log: hvdlite adds no handler unless asked; it has Horovod's levels, and rank 0 logs the choice of algorithm."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hvdlite.algorithms.choice import Place
from hvdlite.config import Config
from hvdlite.job import logs
from hvdlite.job.topology import from_leaders


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = (logs.LOG.level, logs.LOG.propagate, list(logs.LOG.handlers), logs._handler)
    yield
    logs.LOG.setLevel(before[0])
    _, logs.LOG.propagate, logs.LOG.handlers, logs._handler = before


def test_without_a_level_logging_is_the_applications(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the application has no handler, a warning names its logger."""
    before = (logs.LOG.level, logs.LOG.propagate, list(logs.LOG.handlers))
    logs.configure(Config.from_env({}).log, 0)
    assert (logs.LOG.level, logs.LOG.propagate, list(logs.LOG.handlers)) == before
    logs.LOG.warning("heard")
    assert caplog.messages == ["heard"] and capfd.readouterr().err == ""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    logs.LOG.warning("unheard")
    logs.LOG.info("nothing")
    assert capfd.readouterr().err == "hvdlite: unheard\n"


@pytest.mark.parametrize(
    ("word", "level"),
    [("TRACE", logging.DEBUG), ("debug", logging.DEBUG), ("Info", logging.INFO), ("fatal", logging.CRITICAL)],
)
def test_levels_are_horovods(word: str, level: int) -> None:
    logs.configure(Config.from_env({"HOROVOD_LOG_LEVEL": word}).log, 0)
    assert logs.LOG.level == level


def test_a_misspelt_setting_is_told_on_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    for rank in (0, 1):
        logs.warn_of_misspelt(rank, {"HVDLITE_ALGORITM": "HVDLITE_ALGORITHM"})
    assert [record.getMessage() for record in caplog.records] == [
        "HVDLITE_ALGORITM is set, but hvdlite has no such setting. Did you mean HVDLITE_ALGORITHM?"
    ]


def test_an_unknown_level_names_the_variable() -> None:
    with pytest.raises(ValueError, match="HVDLITE_LOG_LEVEL"):
        Config.from_env({"HVDLITE_LOG_LEVEL": "loud"})


def test_lines_carry_rank_and_time_once(capfd: pytest.CaptureFixture[str]) -> None:
    hidden = Config.from_env({"HVDLITE_LOG_LEVEL": "info", "HVDLITE_LOG_HIDE_TIME": "1"}).log
    logs.configure(hidden, 3)
    logs.configure(hidden, 3)
    logs.LOG.info("hello")
    assert capfd.readouterr().err == "hvdlite rank 3 INFO: hello\n"
    logs.configure(Config.from_env({"HVDLITE_LOG_LEVEL": "info"}).log, 3)
    logs.LOG.info("hello")
    assert capfd.readouterr().err.startswith("[20")


def test_the_choice_is_told_by_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    logs.configure(Config.from_env({"HVDLITE_LOG_LEVEL": "info", "HVDLITE_LOG_HIDE_TIME": "1"}).log, 0)
    place = Place(3, True, hosts=((0, 1), (2,)))
    for rank in range(3):
        logs.log_choice(place, from_leaders(rank, [0, 0, 2]))
    told = capfd.readouterr().err
    assert told.count("\n") == 1
    assert "all-reduce on hosts of 2+1 ranks: gradients hierarchical; arrays of 4 KiB " in told
