"""The rules for attaching an optimizer again, and settings that hold inside a context only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

import hvdlite as hvd
from hvdlite.gradients import renewal
from hvdlite.job import runtime
from hvdlite.job.groups import Group


@dataclass
class Attached:
    """An attachment as `renewal` sees it."""

    alive: bool = True
    renewed: bool = False
    name: str = "optimizer.0"
    group: Group | None = None

    def renew(self) -> None: ...


def test_a_second_attachment_is_refused() -> None:
    with pytest.raises(RuntimeError, match="attached already"):
        renewal.require_replaceable(Attached(), shared=True)


@pytest.mark.parametrize(("attached", "shared"), [
    (Attached(alive=False), True),  # hvd.shutdown() has been called since
    (Attached(renewed=True), True),  # elastic.run calls the training function again
    (Attached(), False),  # this rank reduces with no other
])  # fmt: skip
def test_another_may_take_its_place(attached: Attached, shared: bool) -> None:
    renewal.require_replaceable(attached, shared)


def test_a_removed_process_set_is_not_renewed() -> None:
    """Its object has no number any more, like one that was never added."""
    assert not renewal.can_renew(hvd.ProcessSet([0]))


def test_settings_hold_inside_the_context_only() -> None:
    hvd.init()
    try:
        live = runtime.current()
        before = live.config
        with pytest.raises(KeyError), live.configured(replace(before, overlap="0")):
            assert live.config.overlap == "0"
            raise KeyError
        assert live.config is before
    finally:
        hvd.shutdown()
