"""Strategies between two hosts: hierarchical local SGD, compressed outer gradients, and the bytes on the network."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner

SCRIPT = (sys.executable, str(Path(__file__).parent / "scripts" / "strategies.py"))
HEADERS = 14 + 20 + 32
"""The bytes that Ethernet, IP and TCP with time stamps add to a packet."""
ELEMENTS, EVERY = 1024 * 1024, 4


@pytest.mark.parametrize("hosts", [
    pytest.param("hosta:1,hostb:1", marks=pytest.mark.full), "hosta:2,hostb:2",
    pytest.param("hosta:1,hostb:2", marks=pytest.mark.full),
])  # fmt: skip
def test_two_hosts(runner: Runner, hosts: str) -> None:
    """Local SGD and DiLoCo send a quarter of what synchronous training sends, exactly by hvdlite's own count."""
    job = runner.run("--no-prefix", "-H", hosts, "-x", "HVDLITE_OVERLAP=0", *SCRIPT, limit=90.0)
    assert job.returncode == 0, job.stdout + job.stderr
    found = {each["name"]: each for each in map(json.loads, job.stdout.splitlines())}
    share = {"synchronous": 1.0, "local": 1 / EVERY, "diloco": 1 / EVERY, "streaming": 1 / EVERY, "bf16": 0.5 / EVERY}
    assert found.keys() == share.keys()
    for name, each in found.items():
        whole = found["synchronous"]["counted"]
        assert each["counted"] == [of * share[name] for of in whole], found
        for host, (nbytes, packets) in each["sent"].items():
            payload = (nbytes - HEADERS * packets) / EVERY
            assert payload == pytest.approx(4 * ELEMENTS * share[name], rel=0.02), (name, host, found)
