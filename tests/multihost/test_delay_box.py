"""The delay box: packets arrive after the delay, at the rate, unchanged; and nothing is left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.multihost.delay_box import delay_box
from tests.multihost.hosts import hosts

NBYTES = 2_500_000
ANSWERS = f"""
import hashlib, socket
server = socket.create_server(("", 5000))
print("up", flush=True)
peer, _ = server.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(20):
    peer.sendall(peer.recv(1))
found = bytearray()
while len(found) < {NBYTES}:
    found += peer.recv(1 << 20)
peer.sendall(hashlib.sha256(found).digest())
"""
ASKS = f"""
import hashlib, random, socket, time
peer = socket.create_connection(("hostb", 5000))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
times = []
for _ in range(20):
    began = time.perf_counter()
    peer.sendall(b"1")
    peer.recv(1)
    times.append(time.perf_counter() - began)
sent, began = random.Random(0).randbytes({NBYTES}), time.perf_counter()
peer.sendall(sent)
assert peer.recv(32, socket.MSG_WAITALL) == hashlib.sha256(sent).digest()
print(min(times), sorted(times)[10], time.perf_counter() - began)
"""


@pytest.mark.parametrize("rate", ["10mbit", None])
def test_packets_are_delayed(tmp_path: Path, rate: str | None) -> None:
    with hosts(3, shared=[tmp_path]) as there:
        with delay_box(there, 0.02, rate):
            command = there[1].command([sys.executable, "-c", ANSWERS])
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
                assert other.stdout is not None and other.stdout.readline() == "up\n"
                least, middle, long = map(float, there[0].run(sys.executable, "-c", ASKS).split())
        assert least >= 0.04 and middle < 0.06, (least, middle)
        limited = 8 * NBYTES / 10e6  # seconds
        assert 0.95 * limited < long < 1.5 * limited if rate else 0.04 < long < 0.75 * limited, long
        for machine in there.machines:
            with pytest.raises(OSError, match="no eth0"):
                machine.traffic()


def test_a_box_that_cannot_start_is_an_error(tmp_path: Path) -> None:
    with (
        hosts(2, shared=[tmp_path]) as there,
        pytest.raises(RuntimeError, match="did not start"),
        delay_box(there, 0.0, "nonsense"),
    ):
        pass
