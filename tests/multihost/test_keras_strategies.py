"""Keras: a strategy that averages gradients within each of two hosts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner

SCRIPT = (sys.executable, "-P", str(Path(__file__).parent / "scripts" / "keras_strategies.py"))
"""Without its folder in sys.path: a library of Keras would import `compression` from there."""


@pytest.mark.full
@pytest.mark.parametrize("hosts", ["hosta:1,hostb:2", "hosta:2,hostb:2"])
def test_two_hosts(runner: Runner, hosts: str) -> None:
    """The script compares the weights of every rank with those of its host's average."""
    job = runner.run("--no-prefix", "-H", hosts, *SCRIPT, limit=180.0)
    ranks = [host[:-2] for host in hosts.split(",") for _ in range(int(host[-1]))]
    assert job.returncode == 0 and job.stdout.split() == ranks, job.stdout + job.stderr
