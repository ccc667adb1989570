"""One rank fails in every way: the job ends soon, the message names the rank, and no process or file is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hvdlite_launcher.processes import marked

from tests.parallel import jobs

ALL_SIZES = (2, 3, 4)
CHECK, SHUTDOWN = 1.0, 1.5  # seconds of waiting until the stall watch reports, and until it ends the job
BUSY = 1.5  # seconds that a machine with more ranks than cores may add
LIMIT = 40.0
FOR_EVER = ("skip", "astray")  # in these jobs the stall watch has no limit for ending the job


def at(sizes: Sequence[int], *values: str) -> list[object]:
    """Parameters of a test: these values with each size. Four ranks wait for --full."""
    return [pytest.param(*values, size, marks=[pytest.mark.full] if size == 4 else []) for size in sizes]


SIZES = at(ALL_SIZES)


@dataclass
class Ended:
    """The end of a job: its lines by the time at which they came, its exit code, and the time of its end."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    code: int = 0
    over: float = 0.0
    left: list[int] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "\n".join(line for _, line in self.lines)

    def time_of(self, *words: str) -> float:
        """The time of the first line with these words. Fails if there is none."""
        for when, line in self.lines:
            if all(word in line for word in words):
                return when
        raise AssertionError(f"no line with {words} in:\n{self.text}")

    @property
    def fault(self) -> float:
        return next(float(line.split()[-1]) for _, line in self.lines if ">:fault " in line)

    @property
    def files(self) -> list[str]:
        return [word for _, line in self.lines if ":files" in line for word in line.split()[1:]]


def run(size: int, how: str, who: int, **extra: str) -> Ended:
    """Run the job to its end. extra: environment variables."""
    mark = uuid.uuid4().hex
    shutdown = 0 if how in FOR_EVER else SHUTDOWN
    limits = {"STALL_CHECK_TIME_SECONDS": CHECK, "STALL_SHUTDOWN_TIME_SECONDS": shutdown}
    env = jobs.environment(
        {"HVDLITE_TEST": mark, **{f"HOROVOD_{name}": str(limit) for name, limit in limits.items()}, **extra}
    )
    env["PYTHONPATH"] += os.pathsep + str(jobs.ROOT / "launcher")
    command = ["-m", "hvdlite_launcher.cli", "-np", str(size), sys.executable, "-m", "tests.parallel.faults"]
    job = subprocess.Popen([sys.executable, *command, how, str(who)], text=True, cwd=jobs.ROOT, env=env,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    late = threading.Timer(LIMIT, job.terminate)
    late.start()
    ended = Ended()
    assert job.stdout
    for line in job.stdout:
        ended.lines.append((time.time(), line.rstrip("\n")))
    ended.code, ended.over = job.wait(), time.time()
    late.cancel()
    ended.left = list(marked(f"HVDLITE_TEST={mark}".encode()))
    return ended


def ended(size: int, how: str, who: int, code: int, seconds: float) -> Ended:
    """Run the job, and check its exit code, that it ended within that time of the fault, and that nothing is left."""
    job = run(size, how, who)
    assert job.code == code, job.text
    assert job.over - job.fault < seconds + BUSY, job.text
    assert not job.left
    assert job.files and not [path for path in job.files if os.path.exists(path)]
    return job


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("how", "who"), [("loop", 0), ("loop", -1), ("stop", 0), ("stop", -1), ("sleep", 1)])
def test_a_rank_that_never_comes_is_named_by_the_stall_watch(size: int, how: str, who: int) -> None:
    """The report has the line at which the rank is, if the rank can answer.

    Then the job ends, with an error on the waiting ranks.
    """
    job = ended(size, how, who, code=1, seconds=SHUTDOWN + 5)
    rank = who % size
    told = job.time_of("hvdlite: allreduce 'loss'", f"for rank {rank} [HVD901]")
    assert CHECK - 0.1 < told - job.fault < CHECK + 1 + BUSY
    where = {"loop": "in endless_loop: ", "stop": "no answer", "sleep": '"sleep": lambda: time.sleep(60)'}[how]
    assert job.time_of(f"]<stderr>:  {rank} ", where) >= told
    assert job.time_of('in main: hvd.allreduce(np.ones(3), name="loss")') >= told
    assert job.time_of("StallError: the job has stalled") >= job.fault
    assert job.time_of("allreduce 'loss': rank", "waited", f"for rank {rank}.") >= job.fault
    assert job.time_of(f"Rank {rank}", where) >= job.fault


@pytest.mark.parametrize("size", SIZES)
def test_whoever_catches_the_error_of_a_stall_still_ends(size: int) -> None:
    """MPI cannot be finalized then, so the job is aborted. No call hangs before that."""
    job = ended(size, "sleep-2", 1, code=1, seconds=SHUTDOWN + 5)
    for words in ("caught the job has stalled", "no init: this process can no longer communicate"):
        assert job.text.count(words) >= 1, job.text
    assert job.time_of("ended after communication broke") >= job.fault


@pytest.mark.parametrize(("how", "name", "size"), [
    *at(ALL_SIZES, "skip", "accuracy"), *at(ALL_SIZES[1:], "astray", "metric"),  # in a set of two ranks
])  # fmt: skip
def test_ranks_that_wait_for_each_other(how: str, name: str, size: int) -> None:
    """One rank skips a collective, or is in one of another process set.

    A table names the rank and the operation of each wait. The job ends without a limit, since no rank can go on.
    """
    job = ended(size, how, 1, code=1, seconds=CHECK + 5)
    assert job.time_of("allreduce 'loss'", "for rank 1.") >= job.fault
    assert job.time_of(f"allreduce '{name}': rank 1 has waited") >= job.fault
    assert job.time_of("StallError: no rank can go on", "and is ended. [HVD902]") >= job.fault


@pytest.mark.parametrize(("how", "size"), [
    *at(ALL_SIZES, "no-memory"), *at(ALL_SIZES[1:], "no-memory-astray"),
])  # fmt: skip
def test_a_rank_without_memory_for_a_result(how: str, size: int) -> None:
    """The other ranks are in the middle of a gather.

    The rank's next call would be taken for a part of that gather, or would be awaited in another process set.
    """
    job = ended(size, how, 1, code=1, seconds=5)
    assert job.time_of("caught MemoryError") >= job.fault
    assert job.time_of("hvdlite: rank 1 failed: HvdliteError") >= job.fault
    assert job.time_of("allgather 'rows', failed in the middle on this rank (", "MemoryError") >= job.fault


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("who", [0, -1])
def test_a_rank_stopped_inside_a_large_allreduce(size: int, who: int) -> None:
    """No rank can be called back from inside MPI, but the job ends."""
    job = ended(size, "large-SIGSTOP", who, code=1, seconds=SHUTDOWN + 5)
    assert job.time_of("hvdlite: allreduce 'large'", f"for rank {who % size}") >= job.fault
    assert job.time_of("the job has stalled") >= job.fault


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("who", [0, -1])
def test_a_rank_killed_inside_a_large_allreduce(size: int, who: int) -> None:
    job = ended(size, "large-SIGKILL", who, code=137, seconds=5)
    assert job.time_of(f"hvdliterun: rank {who % size} was killed by SIGKILL", "[HVD904]") >= job.fault


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", ["raise", "raise-in-thread", "raise-in-backward"])
def test_a_rank_that_raises_before_the_collective(size: int, how: str) -> None:
    job = ended(size, how, 1, code=1, seconds=5)
    assert job.time_of("hvdlite: rank 1 failed: ValueError", "[HVD903]") >= job.fault
    assert job.time_of("ValueError: no such luck") >= job.fault


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("who", [0, -1])
def test_a_rank_that_exits_early_with_success(size: int, who: int) -> None:
    """It shuts down normally. The other ranks' collective is an error that names it."""
    job = ended(size, "exit-0", who, code=1, seconds=5)
    assert (
        job.time_of(f"ShutdownError: allreduce 'loss': rank {who % size} shut down, ended, or removed", "[HVD910]")
        >= job.fault
    )


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_exits_early_with_a_code(size: int) -> None:
    job = ended(size, "exit-7", 1, code=7, seconds=5)
    assert job.time_of("hvdlite: rank 1 failed: exit code 7 [HVD903]") >= job.fault
    assert job.time_of("hvdliterun: rank 1 ended the job with exit code 7") >= job.fault


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("who", [0, -1])
def test_a_rank_that_vanishes(size: int, who: int) -> None:
    """With os._exit(0) no exit handler runs, and the exit code is 0.

    The rank's keeper has noticed that it never shut down.
    """
    job = ended(size, "os-exit-0", who, code=1, seconds=5)
    assert job.time_of(f"hvdliterun: rank {who % size} ended without hvd.shutdown()") >= job.fault


@pytest.mark.parametrize("how", ["raise", "large-SIGKILL", "os-exit-0", "exit-7"])
def test_a_timeline_is_json_however_the_job_ends(how: str, tmp_path: Path) -> None:
    job = run(2, how, 0, HOROVOD_TIMELINE=str(tmp_path / "trace.json"))
    assert job.code, job.text
    assert json.loads((tmp_path / "trace.json").read_text())[0]["name"] == "process_name"


AT_THE_END = """
import torch
import hvdlite.torch as hvd

hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("algorithm", ["ring", "auto"])
def test_a_script_that_keeps_its_optimizer_to_the_end_ends_without_a_word_of_python(algorithm: str) -> None:
    """Python clears modules before it frees the messages that repeat in each step."""
    result = jobs.run(2, ["-c", AT_THE_END], {"HVDLITE_ALGORITHM": algorithm})
    assert result.code == 0 and "Exception" not in result.output, result.output
