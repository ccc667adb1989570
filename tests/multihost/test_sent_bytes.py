"""The job's count of sent bytes between two hosts, against the hosts' interfaces."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner

SCRIPT = (sys.executable, str(Path(__file__).parent / "scripts" / "sent_bytes.py"))
HEADERS = 14 + 20 + 32
"""The bytes that Ethernet, IP and TCP with time stamps add to a packet."""
MODEL, EVERY = 4 * 1024 * 1024, 4


@pytest.mark.parametrize(("hosts", "ranks"), [
    pytest.param("hosta:1,hostb:1", 1, marks=pytest.mark.full), ("hosta:2,hostb:2", 2),
])  # fmt: skip
def test_two_hosts(runner: Runner, hosts: str, ranks: int) -> None:
    """Each host counts the model once per all-reduce to the other host, and 2n(L-1) bytes in memory for L ranks.

    Interfaces send 2 % more at most: agreements.
    """
    job = runner.run("--no-prefix", "-H", hosts, "-x", "HVDLITE_OVERLAP=0", *SCRIPT, limit=90.0)
    assert job.returncode == 0, job.stdout + job.stderr
    found = {each["name"]: each["sent"] for each in map(json.loads, job.stdout.splitlines())}
    assert found.keys() == {"synchronous", "local"}
    for name, everyone in found.items():
        times = EVERY if name == "synchronous" else 1
        for host in ("hosta", "hostb"):
            its = [numbers for where, numbers in everyone if where == host]
            assert len(its) == ranks
            network, memory = sum(each[2] for each in its), sum(each[3] for each in its)
            assert network == pytest.approx(times * MODEL, rel=0.001), (name, host, found)
            assert memory == pytest.approx(times * 2 * MODEL * (ranks - 1), rel=0.001), (name, host, found)
            for nbytes, packets, *_ in its:
                assert network == pytest.approx(nbytes - HEADERS * packets, rel=0.02), (name, host, found)
