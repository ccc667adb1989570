"""The problems of all hosts appear in one table within 15 seconds, and nothing starts."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError
from hvdlite_launcher.probe import Mpi, find_mpi

from tests.launcher.conftest import ROOT, Runner
from tests.multihost.hosts import Hosts, hosts


@pytest.fixture(scope="module")
def strangers() -> Iterator[Hosts]:
    """Two hosts without keys for each other. Each has its own /tmp."""
    with hosts(2, key="stranger") as found:
        yield found


@pytest.fixture
def refused(strangers: Hosts, tmp_path: Path) -> Runner:
    return Runner(some_mpi(), tmp_path, prefix=strangers[0].command([]))


def some_mpi() -> Mpi:
    try:
        return find_mpi(os.environ)
    except UsageError as error:
        pytest.skip(str(error))


def table(runner: Runner, *arguments: str) -> dict[str, str]:
    """The state of each host, from the table that hvdliterun shows when it starts nothing."""
    begun = time.monotonic()
    job = runner.run(*arguments, sys.executable, "-c", "print('started')")
    assert time.monotonic() - begun < 15.0
    assert (job.returncode, job.stdout) == (1, ""), job.stderr
    first, header, *rows = job.stderr.splitlines()
    assert first.startswith("hvdliterun: nothing was started: ") and header.split() == ["host", "state"]
    states: dict[str, str] = {}
    for row in rows:
        name, text = row[: header.index("state")].strip(), row[header.index("state") :].strip()
        last = name or list(states)[-1]
        states[last] = f"{states.get(last, '')} {text}".strip()
    assert runner.leftovers() == []
    return states


def test_a_refused_key_and_a_name_that_nobody_knows(refused: Runner) -> None:
    states = table(refused, "-np", "3", "-H", "hosta:1,hostb:1,hostz:1")
    assert states["hosta"] == "ready"
    assert states["hostb"].startswith("refused key: ") and "ssh-copy-id hostb" in states["hostb"]
    assert states["hostz"].startswith("unknown name: ")


def test_the_right_key_helps(refused: Runner, strangers: Hosts) -> None:
    job = refused.run("-H", "hosta:1,hostb:1", "-i", str(strangers.folder / "key"), "hostname")
    assert (job.returncode, sorted(job.stdout.split())) == (0, ["[0]<stdout>:hosta", "[1]<stdout>:hostb"])


def test_unreachable_hosts(refused: Runner, strangers: Hosts) -> None:
    """One machine does not exist; on the other no server listens at that port."""
    key = str(strangers.folder / "key")
    states = table(refused, "-np", "3", "-H", "hosta:1,hostb:1,10.99.0.9:1", "-p", "2222", "-i", key)
    assert "refused" in states["hostb"] and "unreachable: " in states["hostb"] and "(-p)" in states["hostb"]
    assert states["10.99.0.9"].startswith("unreachable: ")


@pytest.mark.parametrize(("names", "why"), [
    ("ib7", "this host has no network interface ib7 (it has eth0, lo): name one that all hosts have"),
    ("eth0,lo", "the network interface lo leads to no other host: name one of eth0"),
])  # fmt: skip
def test_a_network_that_is_not_there(refused: Runner, strangers: Hosts, names: str, why: str) -> None:
    key = str(strangers.folder / "key")
    states = table(refused, "-H", "hosta:1,hostb:1", "-i", key, "--network-interfaces", names)
    assert states == dict.fromkeys(("hosta", "hostb"), why)


def test_one_machine_under_two_names(refused: Runner, strangers: Hosts) -> None:
    states = table(refused, "-np", "2", "-H", "hostb:1,10.99.0.2:1", "-i", str(strangers.folder / "key"))
    assert "another host in the list is this machine" in " ".join(states.values())


def test_no_such_interpreter(refused: Runner, strangers: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """hosta has an interpreter in its own /tmp."""
    strangers[0].run("ln", "-sf", sys.executable, "/tmp/python")
    key = str(strangers.folder / "key")
    site = [path for path in sys.path if "site-packages" in path]
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher"), *site])
    command = strangers[0].command(["env", f"PYTHONPATH={path}", "/tmp/python", "-m", "hvdlite_launcher.cli"])
    monkeypatch.setattr(refused, "prefix", [*command, "-H", "hosta:1,hostb:1", "-i", key, "--"])
    job = refused.run("true")
    assert job.returncode == 1
    assert "no such interpreter" in job.stderr and "/tmp/python" in job.stderr


def test_versions_differ(refused: Runner, strangers: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "mkdir -p /tmp/hvdlite && echo '__version__ = \"9.9\"' > /tmp/hvdlite/__init__.py"
    strangers[1].run("sh", "-c", other)
    monkeypatch.setattr(refused, "prefix", [word if word != os.getcwd() else "/" for word in refused.prefix])
    env = refused.env
    monkeypatch.setattr(refused, "env", lambda: {**env(), "PYTHONPATH": f"/tmp:{env()['PYTHONPATH']}"})
    states = table(refused, "-np", "2", "-H", "hosta:1,hostb:1", "-i", str(strangers.folder / "key"))
    assert states["hosta"] == "ready"
    assert states["hostb"].startswith("differs: hvdlite 9.9, others have 0.")


def test_a_folder_that_is_not_there(refused: Runner, strangers: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    strangers[0].run("mkdir", "-p", "/tmp/work")
    prefix = [word if word != os.getcwd() else "/tmp/work" for word in refused.prefix]
    monkeypatch.setattr(refused, "prefix", prefix)
    states = table(refused, "-np", "2", "-H", "hosta:1,hostb:1", "-i", str(strangers.folder / "key"))
    assert states["hostb"] == "No such file or directory: /tmp/work: start from a folder that all hosts have"


def test_host_names_that_mpis_take_for_one(refused: Runner, strangers: Hosts) -> None:
    """MPIs compare names up to the first dot."""
    names = ("gpu.one", "gpu.two")
    for host, name in zip(strangers.machines, names, strict=True):
        host.run("hostname", name)
    try:
        states = table(refused, "-H", "hosta:1,hostb:1", "-i", str(strangers.folder / "key"))
    finally:
        for host in strangers.machines:
            host.run("hostname", host.name)
    assert states["hostb"] == "two hosts call themselves gpu: rename one, or name it once with all its slots [HVD017]"


def test_a_host_without_room(refused: Runner, strangers: Hosts) -> None:
    """Keepers could not note failures there, and the MPI's daemons could not start."""
    strangers[1].run("mount", "-o", "remount,size=32k", "/tmp")
    try:
        states = table(refused, "-H", "hosta:1,hostb:1", "-i", str(strangers.folder / "key"))
    finally:
        strangers[1].run("mount", "-o", "remount,size=50%", "/tmp")
    assert states["hostb"].startswith("No space left on device: /tmp/hvdlite-")


def test_all_hosts_are_checked(refused: Runner, strangers: Hosts) -> None:
    """Each host is examined: one has little shared memory."""
    arguments = ["--check", "-H", "hosta:1,hostb:1", "-i", str(strangers.folder / "key")]
    strangers[1].run("mount", "-o", "remount,size=64m", "/dev/shm")
    try:
        told, listed = refused.run(*arguments, "--json", limit=60), refused.run(*arguments, limit=60)
    finally:
        strangers[1].run("mount", "-o", "remount,size=50%", "/dev/shm")
    assert (told.returncode, told.stderr, listed.returncode) == (0, "", 0)
    said = json.loads(told.stdout)
    assert [(host["host"], host["ready"], host["own_name"]) for host in said["hosts"]] == [
        ("hosta", True, "hosta"),
        ("hostb", True, "hostb"),
    ]
    warnings = [(each["host"], each["name"]) for each in said["findings"] if each["state"] == "warning"]
    assert warnings == [("hostb", "shared memory")]
    assert listed.stdout.splitlines()[-1] == said["verdict"]
    assert ", 2 hosts" in said["verdict"] and said["verdict"].endswith("; warnings: shared memory on hostb")


def test_the_check_tells_of_a_host_that_is_not_ready(refused: Runner) -> None:
    job = refused.run("--check", "--json", "-H", "hosta:1,hostb:1,hostz:1", "--start-timeout", "5", limit=60)
    said = json.loads(job.stdout)
    assert (job.returncode, said["ready"], said["ready_for"]) == (1, False, [])
    problems = {host["host"]: host["problem"] for host in said["hosts"]}
    assert problems["hosta"] is None and problems["hostb"].startswith("refused key: ")
    assert problems["hostz"].startswith("unknown name: ")
