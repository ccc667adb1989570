"""hvdliterun's ranks name the rank that keeps ranks on another host waiting: the stall watch uses MPI."""

from __future__ import annotations

import sys

import pytest

from tests.launcher.conftest import Runner

LIMITS = ("-x", "HVDLITE_STALL_CHECK_TIME_SECONDS=1", "-x", "HVDLITE_STALL_SHUTDOWN_TIME_SECONDS=1.5")
FAULT = (sys.executable, "-m", "tests.parallel.faults")


@pytest.mark.parametrize(("how", "where"), [("loop", "in endless_loop: "), ("stop", "no answer")])
@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_never_comes(runner: Runner, how: str, where: str, who: int) -> None:
    job = runner.run("-np", "3", "-H", "hosta:1,hostb:2", *LIMITS, *FAULT, how, str(who))
    assert job.returncode == 1, job.stderr
    waiting = "1-2" if who == 0 else "0-1"
    lines = job.stderr.splitlines()
    assert any(f"hvdlite: allreduce 'loss': ranks {waiting} have waited 1 s for rank {who}" in line for line in lines)
    assert any(f"<stderr>:  {who} " in line and where in line for line in lines), job.stderr
    assert "StallError: the job has stalled" in job.stderr
    assert runner.leftovers() == []
