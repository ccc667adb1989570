"""The rules for attaching an optimizer again, and settings that hold inside a context only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

import hvdlite as hvd
from hvdlite.gradients import attaching
from hvdlite.job import runtime


@pytest.fixture(autouse=True)
def _job() -> Iterator[None]:
    """A job of one."""
    hvd.init()
    yield
    hvd.shutdown()


def test_a_second_attachment_is_refused() -> None:
    with pytest.raises(RuntimeError, match="attached already"):
        attaching.require_replaceable(alive=True, renewed=False, process_set=hvd.global_process_set)


@pytest.mark.parametrize(("alive", "renewed"), [(False, False), (True, True)])
def test_another_may_take_its_place(alive: bool, renewed: bool) -> None:
    """hvd.shutdown() has been called since; or elastic.run calls the training function again."""
    attaching.require_replaceable(alive, renewed, hvd.global_process_set)


def test_a_removed_process_set_is_not_renewed() -> None:
    """Its object has no number any more, like one that was never added."""
    assert not attaching.can_renew(hvd.ProcessSet([0]))


def test_settings_hold_inside_the_context_only() -> None:
    live = runtime.current()
    before = live.config
    with pytest.raises(KeyError), live.configured(replace(before, overlap="0")):
        assert live.config.overlap == "0"
        raise KeyError
    assert live.config is before
