"""A lane's thread gets short time slices if the kernel grants them. Nothing else changes, and no other thread does."""

from __future__ import annotations

import os
import platform
import re
import sys
import threading
from typing import Any

import pytest

from hvdlite.algorithms import Place
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.system import time_slices
from hvdlite.transports.threads import alone


def facts() -> Any:
    """The calling thread's scheduling facts without its time slice, and the slice."""
    mine = time_slices.attributes()
    return mine and ((mine.policy, mine.flags, mine.nice, mine.priority), mine.runtime)


def granted() -> bool:
    """Whether this kernel has settable time slices."""
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return sys.platform == "linux" and version >= (6, 12) and platform.machine() in time_slices.GET_AND_SET


def test_a_lanes_thread_has_short_slices() -> None:
    before, lane = facts(), Lane(alone(), Place(1, False))
    during = lane.submit(Request(Signature("test", "x"), lambda lane: (facts(), threading.get_ident()))).wait()
    assert during[1] != threading.get_ident() and facts() == before
    if granted():
        assert during[0] == (before[0], time_slices.SLICE) and before[1] != time_slices.SLICE
    else:
        assert during[0] == before
    lane.leave()


@pytest.mark.parametrize("machine", ["riscv64", "nonsense"])
def test_elsewhere_nothing_happens(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = facts()
    monkeypatch.setattr(platform, "machine", lambda: machine)
    done: list[int] = []
    time_slices.promptly(lambda: done.append(1))
    monkeypatch.undo()
    assert done == [1] and facts() == before


def test_a_thread_of_another_class_stays_in_it() -> None:
    """The class is SCHED_BATCH, which any thread may choose."""

    def batch() -> None:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = facts()
        time_slices.ask_for_short_slices()
        found.append(facts() == before and os.sched_getscheduler(0) == os.SCHED_BATCH)

    found: list[bool] = []
    thread = threading.Thread(target=batch)
    thread.start()
    thread.join()
    assert found == [True]
