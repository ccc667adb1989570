"""The test hosts are separate machines on one network, and leave no trace."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.launcher.conftest import wait_until
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
    sleep = f"sleep {10000 + os.getpid()}.5"
    argv = [sys.executable, "-m", "tests.multihost.hosts", "--", *sleep.split()]
    env = {**os.environ, "TMPDIR": str(tmp_path)}  # a killed owner cannot remove its folder
    owner = subprocess.Popen(argv, cwd=ROOT, env=env)
    try:
        assert wait_until(lambda: sleeps(sleep), 10.0)
    finally:
        owner.kill()
        owner.wait()
    assert wait_until(lambda: not sleeps(sleep), 5.0), "processes are left"


def sleeps(command: str) -> bool:
    """Whether a process with exactly this command line runs anywhere."""
    wanted = command.replace(" ", "\0") + "\0"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if path.read_text(errors="replace") == wanted:
                return True
    return False
