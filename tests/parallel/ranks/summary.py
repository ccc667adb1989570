"""The summary: sleeps as computing, and operations that sleep, so that each part of a step is known."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import time
import unittest.mock
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite.api.summary import Summary, gathered
from hvdlite.job import folder, runtime
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Signature
from tests.parallel.common import require_error, restart

STEPS, SLACK = 8, 0.008  # seconds per step for what a busy machine adds


def submit(seconds: float) -> Handle[None]:
    """An operation of all ranks that takes so many seconds once all have called it."""
    live = runtime.current()
    return live.everyone.eager.submit(Request(Signature("note", "x"), lambda at: time.sleep(seconds)))


def run(seconds: float) -> None:
    """The same, and wait for it."""
    runtime.current().everyone.eager.run(Request(Signature("note", "x"), lambda at: time.sleep(seconds)))


def parts() -> dict[str, float]:
    """This rank's parts of a step in seconds since the last `hvd.init()`."""
    steps = runtime.current().observers.steps.steps
    assert steps.number == STEPS
    spent = steps.spent
    found = {"computing": steps.seconds - spent.exposed, "waiting": spent.waiting, "under way": spent.under_way,
             "communication": spent.exposed - spent.waiting}  # fmt: skip
    return {name: seconds / STEPS for name, seconds in found.items()}


def require_parts(**expected: float) -> None:
    """Check this rank's parts of a step."""
    found = parts()
    for name, seconds in expected.items():
        name = name.replace("_", " ")
        assert -SLACK / 4 <= found[name] - seconds < SLACK, (name, seconds, found)


def check_computing_and_waiting() -> None:
    """Rank r computes for 20 + 20 r ms, and waits for the last rank."""
    restart()
    p, r = hvd.size(), hvd.rank()
    for _ in range(STEPS + 1):
        time.sleep(0.02 + 0.02 * r)
        hvd.allreduce(np.ones(100, np.float32), name="gradient")
        hvd.count_step(samples=5)
    require_parts(computing=0.02 + 0.02 * r, waiting=0.02 * (p - 1 - r), communication=0.0)
    found = hvd.metrics()
    assert len(set(hvd.allgather_object(str(found)))) == 1
    rank, extra = found["hvdlite/slowest_rank"], found["hvdlite/slowest_rank_extra_ms"]
    if p > 1:
        assert rank == p - 1 and abs(extra - 10 * p) < 1e3 * SLACK, found
    assert found["hvdlite/steps"] == STEPS + 1
    assert (
        abs(found["hvdlite/samples_per_s"] * found["hvdlite/step_ms"] / 1e3 / p - 5) < 0.1
    )  # steps of ranks differ by some us


def check_communication_in_the_callers_thread() -> None:
    """An operation of 30 ms that the caller waits for at once."""
    restart()
    for _ in range(STEPS + 1):
        time.sleep(0.01)
        run(0.03)
        hvd.count_step()
    require_parts(computing=0.01, communication=0.03, under_way=0.03)


def check_hidden_communication() -> None:
    """An operation of 30 ms under way while the rank computes for 50 ms: all of it is hidden. For 10 ms: a third is."""
    for computing, exposed in ((0.05, 0.0), (0.01, 0.02)):
        restart()
        for _ in range(STEPS + 1):
            handle = submit(0.03)
            time.sleep(computing)
            handle.wait()
            hvd.count_step()
        require_parts(computing=computing, communication=exposed, under_way=0.03)
        hidden = hvd.metrics()["hvdlite/hidden_comm_ms"]
        assert abs(hidden - 1e3 * (0.03 - exposed)) < 1e3 * SLACK, hidden


def check_a_summary_of_a_part() -> None:
    restart()
    for _ in range(3):
        hvd.count_step()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        earlier = hvd.summary()
    hvd.count_step()
    earlier = gathered("a test", since=None)  # printing takes a while
    assert isinstance(earlier, Summary) and ("3 steps" in printed.getvalue()) == (hvd.rank() == 0)
    for _ in range(4):
        time.sleep(0.01)
        hvd.count_step()
    found = hvd.metrics(since=earlier)
    assert found["hvdlite/steps"] == 4 and 10 <= found["hvdlite/compute_ms"] < 10 + 1e3 * SLACK, found
    assert 0 < found["hvdlite/wall_s"] < hvd.metrics()["hvdlite/wall_s"]


def check_beginning() -> None:
    """The parts of the time before the first step add up to it."""
    restart()
    time.sleep(0.1)
    hvd.count_step()
    beginning = runtime.current().observers.steps
    assert beginning.first is not None and 0.1 <= beginning.first - beginning.ready < 0.1 + SLACK * 4
    found = hvd.metrics()
    assert found["hvdlite/first_step_launch_s"] == 0
    assert found["hvdlite/wall_s"] >= found["hvdlite/first_step_s"] > found["hvdlite/first_step_imports_s"] > 0.1


def check_summary_at_the_end() -> None:
    """With HVDLITE_SUMMARY rank 0 shows the table when all ranks have left: on stderr without hvdliterun."""
    for style, shows in (("1", True), ("color", True), ("0", False)):
        restart(SUMMARY=style)
        for _ in range(3):
            hvd.count_step()
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            hvd.shutdown()
        hvd.init()
        text = printed.getvalue()
        assert ("3 steps" in text) == (shows and hvd.rank() == 0), (style, text)
        assert ("\x1b[" in text) == (style == "color" and hvd.rank() == 0)


def check_summaries_in_the_jobs_folder() -> None:
    """With hvdliterun rank 0 leaves the text of each job in the job's folder, and prints nothing."""
    restart(SUMMARY="1")
    with tempfile.TemporaryDirectory() as path:
        here = unittest.mock.patch.multiple(folder, FOLDER=path, RANK=str(hvd.rank()))
        with here, contextlib.redirect_stderr(io.StringIO()) as printed:
            for steps in (1, 2):
                hvd.init()
                for _ in range(steps):
                    hvd.count_step()
                hvd.shutdown()
        hvd.init()
        found = [each.name for each in Path(path).iterdir() if each.name.startswith("summary")]
        assert found == (["summary.0"] if hvd.rank() == 0 else []) and not printed.getvalue(), found
        text = (Path(path) / "summary.0").read_text() if hvd.rank() == 0 else "1 step, 2 steps"
        assert "1 step" in text and "2 steps" in text


def check_a_job_whose_rank_0_is_not_hvdliteruns() -> None:
    """`init(comm=...)` can make hvdliterun's rank 1 rank 0. hvdliterun does not read its file, so it prints."""
    restart(SUMMARY="1")
    with tempfile.TemporaryDirectory() as path:
        here = unittest.mock.patch.multiple(folder, FOLDER=path, RANK=str(hvd.rank() + 1))
        with here, contextlib.redirect_stderr(io.StringIO()) as printed:
            hvd.shutdown()
        assert not [each for each in Path(path).iterdir() if each.name.startswith("summary")]
        hvd.init()
    assert ("no training steps" in printed.getvalue()) == (hvd.rank() == 0)


def check_ranks_must_agree_on_a_summary() -> None:
    size, style = hvd.size(), "1" if hvd.rank() == 0 else "0"
    hvd.shutdown()
    os.environ["HVDLITE_SUMMARY"] = style
    try:
        if size == 1:
            hvd.init()
            hvd.shutdown()
        else:
            require_error(hvd.HvdliteError, hvd.init, "HVDLITE_SUMMARY differs")
    finally:
        del os.environ["HVDLITE_SUMMARY"]
        hvd.init()


def check_a_summary_that_fails_does_not_fail_the_job() -> None:
    """At the end, without a summary: a rank's record raises, or rank 0 cannot print. All ranks leave well."""
    for fails in ("record", "print"):
        restart(SUMMARY="1")
        broken, expected = unittest.mock.Mock(side_effect=OSError("no space left")), ""
        if fails == "record":
            expected = f"no summary: rank {hvd.size() - 1}: OSError: no space left"
        name = "hvdlite.api.summary.record" if fails == "record" else "builtins.print"
        last = hvd.rank() == (hvd.size() - 1 if fails == "record" else 0)
        patch = unittest.mock.patch(name, broken) if last else contextlib.nullcontext()
        with patch, contextlib.redirect_stderr(io.StringIO()) as printed:
            hvd.shutdown()
        assert broken.called == last
        hvd.init()
        assert hvd.rank() or expected in printed.getvalue(), printed.getvalue()
        assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()
    restart()


def check_summaries_of_other_jobs_and_wrong_arguments() -> None:
    earlier = gathered("a test", since=None)
    restart()
    require_error(ValueError, lambda: hvd.metrics(since=earlier), "before the last hvd.init()")
    require_error(TypeError, lambda: hvd.metrics(since=hvd.metrics()), "what hvd.summary() has returned")  # type: ignore[arg-type]
    for _ in range(3):
        hvd.count_step(samples=np.int32(2**31 - 1))
    assert runtime.current().observers.steps.samples == 3 * (2**31 - 1)
    with contextlib.redirect_stdout(Writer()) as printed:
        hvd.summary()
    assert ("3 steps" in printed.text) == (hvd.rank() == 0)


class Writer:
    """A stdout of a script's own, which can only write."""

    text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        """Nothing is kept back."""
