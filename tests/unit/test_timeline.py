"""The timeline's file is complete JSON at every moment, and a full disk does not disturb training."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hvdlite.algorithms import Place
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Observer
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.observers import timeline
from hvdlite.observers.timeline import Timeline, kind
from hvdlite.transports.threads import alone


def run(lane: Lane, name: str) -> None:
    lane.run(Request(Signature("allreduce", name, (("dtype", "float32"), ("shape", (2, 3)))), lambda lane: None))


def test_the_file_is_json_while_it_grows(tmp_path: Path) -> None:
    trace = Timeline(str(tmp_path / "trace"))
    lane = Lane(alone(), Place(1, False), observers=[trace])
    sizes = set()
    for i in range(40):
        run(lane, f"x{i}")
        time.sleep(0.01)
        sizes.add(len(json.loads((tmp_path / "trace").read_text())))
    trace.stop()
    assert len(sizes) > 2 and "allreduce.x39" in (tmp_path / "trace").read_text()


def test_a_full_disk_ends_the_timeline_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of a batch is written, then the disk is full. The file is as before the batch, and the lane goes on."""
    monkeypatch.setattr(timeline, "FLUSH_SECONDS", 60)
    trace = Timeline(str(tmp_path / "trace"))
    lane = Lane(alone(), Place(1, False), observers=[trace])
    before = json.loads((tmp_path / "trace").read_text())
    write, room = os.pwrite, [20]

    def full(file: int, data: bytes, offset: int) -> int:
        if bytes(data) == timeline.END:
            return write(file, data, offset)
        if not room.pop():
            raise OSError(28, "No space left on device")
        room.append(0)
        return write(file, data[:20], offset)

    monkeypatch.setattr(os, "pwrite", full)
    run(lane, "x")
    trace.flush()
    run(lane, "y")
    trace.stop()
    assert json.loads((tmp_path / "trace").read_text()) == before
    assert caplog.text.count("No space left") == 1


def test_a_file_that_cannot_be_written_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    observers: list[Observer] = []
    timeline.switch(observers, "/nowhere/trace", False, 1)
    assert not observers and "/nowhere/trace" in caplog.text


@pytest.mark.parametrize(("signature", "word"), [
    (Signature("allreduce", "x", (("operation", "Average"),)), "ALLREDUCE"),
    (Signature("allreduce", "x", (("operation", "Adasum"),)), "ADASUM"),
    (Signature("grouped_allgather", "x"), "ALLGATHER"), (Signature("gradients", "x"), "ALLREDUCE"),
    (Signature("new lane", "x"), "NEW_LANE"),
])  # fmt: skip
def test_kinds(signature: Signature, word: str) -> None:
    assert kind(signature) == word
