"""A sharded optimizer gives the bits of one that is not, on two hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner

SCRIPT = (sys.executable, str(Path(__file__).parent / "scripts" / "sharded.py"))


@pytest.mark.full
@pytest.mark.parametrize("hosts", ["hosta:1,hostb:1", "hosta:2,hostb:2", "hosta:1,hostb:2"])
def test_two_hosts(runner: Runner, hosts: str, tmp_path: Path) -> None:
    """The script compares the weights on every rank."""
    job = runner.run("--no-prefix", "-H", hosts, "-x", f"CHECKPOINTS={tmp_path}", *SCRIPT, limit=60.0)
    ranks = [host[:-2] for host in hosts.split(",") for _ in range(int(host[-1]))]
    assert job.returncode == 0 and job.stdout.split() == ["trained", "on", *ranks], job.stdout + job.stderr
