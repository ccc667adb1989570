"""The hosts themselves: apart in what must be apart, joined by a network, and gone without a trace."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.multihost.hosts import ROOT, Hosts

PROCESSES = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"


def test_hosts_share_no_memory_no_processes_and_no_tmp(pair: Hosts) -> None:
    one, other = pair.machines
    for folder in ("/dev/shm", "/tmp"):
        one.run("touch", f"{folder}/mine")
        assert "mine" in one.run("ls", folder)
        assert "mine" not in other.run("ls", folder)
        assert not Path(folder, "mine").exists()
    assert "sshd" in one.run("sh", "-c", PROCESSES)
    assert "1234.5" in one.run("sh", "-c", f"sleep 1234.5 & {PROCESSES}; kill $!")
    assert "1234.5" not in other.run("sh", "-c", PROCESSES)


def test_one_reaches_the_other_by_name_and_the_bytes_are_counted(pair: Hosts) -> None:
    one, other = pair.machines
    before = other.traffic()[0]
    assert one.run("ssh", "hostb", "hostname; head -c 1000000 /dev/zero > /dev/null") == "hostb\n"
    assert one.run("sh", "-c", "head -c 1000000 /dev/urandom | ssh hostb wc -c") == "1000000\n"
    assert 1_000_000 < other.traffic()[0] - before < 1_200_000


def test_a_rate_is_held() -> None:
    """1 MB at 8 Mbit/s lasts a second, less the burst."""
    command = "head -c 1000000 /dev/urandom | ssh hostb cat > /dev/null"
    argv = [sys.executable, "-m", "tests.multihost.hosts", "--rate", "8mbit", "--", "sh", "-c", command]
    begin = time.monotonic()
    subprocess.run(argv, cwd=ROOT, check=True, timeout=30)
    assert time.monotonic() - begin > 0.7


def test_the_death_of_the_owner_takes_everything_along(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.multihost.hosts", "--", "sh", "-c", "hostname; exec sleep 4321.5"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed owner cannot remove its folder
    owner = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "hosta\n"
    assert _sleepers()
    owner.kill()
    owner.wait()
    deadline = time.monotonic() + 5
    while _sleepers():
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.02)
    owner.stdout.close()


def _sleepers() -> bool:
    return "sleep 4321.5" in subprocess.run(["sh", "-c", PROCESSES], capture_output=True, text=True).stdout.replace(
        "exec sleep 4321.5", ""
    )
