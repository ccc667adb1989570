"""The trace of a job: Horovod's events, in JSON that can be read at any moment."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite import ops
from hvdlite.job import runtime
from tests.parallel.common import at_sizes, last, require_error, restart

Trace = list[dict[str, Any]]


def shared_folder() -> Path:
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))


def events_of(trace: Trace, tensor: str) -> Trace:
    """A tensor's events, without metadata."""
    (process,) = (e["pid"] for e in trace if e.get("name") == "process_name" and e["args"].get("name") == tensor)
    return [event for event in trace if event["pid"] == process and event["ph"] != "M"]


def traced(folder: Path, mark_cycles: bool = False) -> Trace:
    """Run two all-reduces, an all-gather and a mismatch. Returns the timeline's events on rank 0, else none."""
    path = folder / f"trace-{mark_cycles}.json"
    hvd.start_timeline(str(path), mark_cycles)
    for _ in range(2):
        hvd.allreduce(np.ones((2, 3), np.float32), name="loss")
    hvd.allgather(np.ones((2, 3)), name="rows")
    require = hvd.MismatchError if hvd.size() > 1 else None
    try:
        hvd.allreduce(np.ones(4 if last() else 3), name="odd")
    except hvd.MismatchError:
        assert require
    hvd.stop_timeline()
    hvd.allreduce(np.ones(3), name="unseen")
    return json.loads(path.read_text()) if hvd.rank() == 0 else []


@at_sizes(2, 3, 4)
def check_the_same_name_in_a_process_set() -> None:
    """The timeline's name contains the members, if they are not all ranks."""
    hvd.shutdown()
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    alone = hvd.ProcessSet([0])
    hvd.init(process_sets=[alone])
    del os.environ["HOROVOD_TIMELINE"]
    path = shared_folder() / "sets.json"
    hvd.start_timeline(str(path))
    if hvd.rank() == 0:
        hvd.allreduce(np.ones(3), name="loss", process_set=alone)
    hvd.allreduce(np.ones(3), name="loss")
    hvd.stop_timeline()
    if hvd.rank() == 0:
        trace = json.loads(path.read_text())
        for tensor in ("allreduce.loss", "allreduce.loss (rank 0)"):
            assert [event["ph"] for event in events_of(trace, tensor) if event["ph"] in "BE"] == ["B", "E"] * 2, tensor
    restart()


def check_a_timeline() -> None:
    p = hvd.size()
    restart(TIMELINE="DYNAMIC")
    folder = shared_folder()
    for mark_cycles in (True, False):
        trace = traced(folder, mark_cycles)
        if hvd.rank() == 0:
            first, second = trace[:2]
            began = first["args"]["start_time_since_epoch_in_micros"]
            assert first["ph"] == "M" and first["pid"] == 0 and abs(began / 1e6 - time.time()) < 60
            assert second["name"] == "process_sort_index" and second["args"] == {"sort_index": 0}
            loss = events_of(trace, "allreduce.loss")
            others = [("X", str(rank)) for rank in range(1, p)]
            once = [("B", "NEGOTIATE_ALLREDUCE"), ("X", "0"), *others, ("E", None), ("B", "ALLREDUCE"), ("E", None)]
            assert [(e["ph"], e.get("name")) for e in loss] == 2 * once
            assert loss[-1]["args"] == {"dtype": "float32", "shape": "[2, 3]"}
            assert all(e["dur"] == 0 for e in loss if e["ph"] == "X")
            assert [e["ts"] for e in loss] == sorted(e["ts"] for e in loss) and 0 <= loss[0]["ts"] < 60e6
            assert events_of(trace, "allgather.rows")[-2]["name"] == "ALLGATHER"
            odd = events_of(trace, "allreduce.odd")
            assert p == 1 or [(e["ph"], e.get("args")) for e in odd] == [("B", None), ("X", None), ("E", None)]
            assert (sum(e.get("name") == "CYCLE_START" for e in trace) >= 3) == mark_cycles
            assert all(e["ph"] == "i" and e["s"] == "g" for e in trace if e.get("name") == "CYCLE_START")
            assert not any(e.get("args", {}).get("name") == "allreduce.unseen" for e in trace)
    restart()


def check_a_timeline_from_the_environment_is_complete_at_shutdown() -> None:
    folder = shared_folder()
    restart(TIMELINE=str(folder / "trace.json"), TIMELINE_MARK_CYCLES="1")
    handles = [ops.allreduce_.start(np.ones(10), name=f"x{i}") for i in range(50)]
    for handle in handles:
        handle.wait()
    restart()
    if hvd.rank() == 0:
        text = (folder / "trace.json").read_text()
        assert all(f'"allreduce.x{i}"' in text for i in range(50)) and "CYCLE_START" in text and json.loads(text)
    hvd.barrier()


def check_switching() -> None:
    """The same file twice changes nothing. Another file ends the first. One stop too many is harmless."""
    restart(TIMELINE="DYNAMIC")
    folder = shared_folder()
    hvd.stop_timeline()
    for tensor, name in (("first", "one"), ("second", "one"), ("two", "two")):
        hvd.start_timeline(str(folder / name))
        hvd.allreduce(np.ones(3), name=tensor)
    if hvd.rank() == 0:
        one = str(json.loads((folder / "one").read_text()))
        assert "allreduce.first" in one and "allreduce.second" in one
        assert json.loads((folder / "two").read_text())  # complete, although the timeline goes on
    hvd.stop_timeline()
    hvd.stop_timeline()
    if hvd.rank() == 0:
        both = {name: (folder / name).read_text() for name in ("one", "two")}
        assert "allreduce.two" in both["two"] and "allreduce.two" not in both["one"]
        assert len(runtime.current().observers.listening) == 1
    restart()


def check_errors() -> None:
    require_error(ValueError, lambda: hvd.start_timeline("x.json"), "HVDLITE_TIMELINE=DYNAMIC")
    restart(TIMELINE="DYNAMIC")
    hvd.start_timeline("/nowhere/to/be/found.json")  # this is an error in the log
    assert not os.path.exists("/nowhere") and len(runtime.current().observers.listening) == 1
    hvd.shutdown()
    for call in (hvd.stop_timeline, lambda: hvd.start_timeline("x.json")):
        require_error(ValueError, call, "hvd.init()")
    restart()
