"""Data, sharded, tensor and pipeline parallel training over torch.distributed reach one process' weights on two hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner

SCRIPT = (sys.executable, str(Path(__file__).parent / "scripts" / "parallelisms.py"))


@pytest.mark.parametrize("hosts", ["hosta:2", "hosta:2,hostb:2"])
def test_all_ways_reach_the_weights_of_one_process(runner: Runner, hosts: str) -> None:
    """The script compares the weights on every rank."""
    job = runner.run("--no-prefix", "-H", hosts, *SCRIPT, limit=60.0)
    ranks = [host.partition(":")[0] for host in hosts.split(",") for _ in range(2)]
    assert job.returncode == 0 and job.stdout.split() == ["trained", "on", *ranks], job.stdout + job.stderr
