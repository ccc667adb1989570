"""Lossy compression between two hosts: nothing is lost, and the interfaces send as many bytes as the docstrings say."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import Runner

SCRIPT = (sys.executable, str(Path(__file__).parent / "scripts" / "compression.py"))
HEADERS = 14 + 20 + 32
"""The bytes that Ethernet, IP and TCP with time stamps add to a packet."""
ELEMENTS = 2 * 1024 * 1024
PAYLOAD = {
    "none": 2 * 4 * ELEMENTS / 2,
    "topk": 8 * 0.01 * ELEMENTS,
    "powersgd": 2 * (8 * 16 * (1024 + 1024) / 2),
    "randomk": 8 * 0.05 * ELEMENTS / 2,
    "int8": 2 * (8 / 8 + 4 / 256) * ELEMENTS / 2,
}
"""The bytes that each of two hosts sends in a step, however many drivers it has."""
ON_ONE_HOST = """
import torch
import hvdlite.torch as hvd

hvd.init()
torch.manual_seed(0)
for _ in range(2):
    net = torch.nn.Linear(64, 64)
    sgd = torch.optim.SGD(net.parameters(), 1.0)
    optimizer = hvd.DistributedOptimizer(sgd, compression=hvd.Compression.topk())
    net(torch.ones(64)).sum().backward()
    assert (net.weight.grad == 1).all() and not optimizer._hvdlite.gradients.store.entries
"""


@pytest.mark.parametrize("hosts", [
    pytest.param("hosta:1,hostb:1", marks=pytest.mark.full), pytest.param("hosta:2,hostb:2", marks=pytest.mark.full),
    "hosta:1,hostb:2",
])  # fmt: skip
def test_two_hosts(runner: Runner, hosts: str) -> None:
    """The script checks sums and bits on every rank. Of the bytes in packets, headers are taken off."""
    job = runner.run("--no-prefix", "-H", hosts, "-x", "HVDLITE_OVERLAP=0", *SCRIPT, limit=90.0)
    assert job.returncode == 0, job.stdout + job.stderr
    found = [json.loads(line) for line in job.stdout.splitlines()]
    assert [each["name"] for each in found] == [*PAYLOAD]
    for each in found:
        for host, (nbytes, packets) in each["sent"].items():
            payload = nbytes - HEADERS * packets
            assert payload == pytest.approx(PAYLOAD[each["name"]], rel=0.02), (host, found)


def test_one_host_compresses_nothing_and_says_so_once(runner: Runner) -> None:
    job = runner.run("--no-prefix", "-H", "hosta:2", sys.executable, "-c", ON_ONE_HOST, limit=60.0)
    assert job.returncode == 0, job.stdout + job.stderr
    assert (job.stdout + job.stderr).count("all ranks are on one host and share memory") == 1, job.stdout + job.stderr
