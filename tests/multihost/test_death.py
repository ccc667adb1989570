"""Whatever ends a job on two hosts, the first rank that failed is reported once, with its host, and nothing is left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hvdlite_launcher.times import HOST_TIMEOUT, START_HOST_TIMEOUT

from tests.launcher.conftest import SCRIPTS, Runner, wait_until
from tests.multihost.hosts import Hosts, Machine, hosts

FAILS = (sys.executable, str(SCRIPTS / "fails.py"))
SLEEPS = (sys.executable, str(SCRIPTS / "sleeps.py"))


def traces(pair: Hosts) -> str:
    """The names in folders where jobs may leave files, on all hosts, except the files that Hydra leaves after an abort."""
    return "".join(machine.run("ls", "-I", "hydra_hwloc*", "/tmp", "/dev/shm") for machine in pair.machines)


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("exception", 1, "rank 1 on hostb ended the job with exit code 1 [HVD903]"),
        ("exit", 7, "rank 1 on hostb ended the job with exit code 7 [HVD903]"),
        ("signal9", 137, "rank 1 on hostb was killed by SIGKILL (signal 9) [HVD904]"),
        ("signal11", 139, "rank 1 on hostb was killed by SIGSEGV (signal 11) [HVD904]"),
    ],
)
def test_a_rank_on_another_host_fails(runner: Runner, pair: Hosts, how: str, code: int, told: str) -> None:
    before = traces(pair)
    job = runner.run("-np", "3", "-H", "hosta:1,hostb:2", *FAILS, how)
    assert job.returncode == code, job.stderr
    assert job.stderr.splitlines()[-1] == f"hvdliterun: {told}"
    assert "[1]<stdout>:last words\n" in job.stdout
    assert job.stderr.count("Traceback") == (how == "exception")
    assert not re.search(r"(?m)^\[\w+:\d+\] \*\*\* An error occurred in Socket closed", job.stderr)  # a rank may say so
    assert runner.leftovers() == [] and traces(pair) == before


def test_word_of_the_cause_comes_after_the_job_has_ended_for_its_consequence(runner: Runner, pair: Hosts) -> None:
    """On a slow machine: when the MPI's launcher ends, the agent of the other host has not reported its rank yet."""
    job = start(runner, pair)
    ranks = {environment(pid)["HVDLITE_JOB_RANK"]: pid for pid in processes(runner, re.escape(" ".join(SLEEPS)))}
    (agent,) = agents(pair[1])
    os.kill(agent, signal.SIGSTOP)
    os.kill(ranks["2"], signal.SIGKILL)
    time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):  # Intel's MPI has sent it by now
        os.kill(ranks["0"], signal.SIGTERM)  # from whom is not told, and the MPI sends it to all when one has failed
    assert wait_until(lambda: not mpiruns(runner), 4.0)
    os.kill(agent, signal.SIGCONT)
    _, err = job.communicate(timeout=5.0)
    assert (job.returncode, err) == (137, "hvdliterun: rank 2 on hostb was killed by SIGKILL (signal 9) [HVD904]\n")
    assert runner.wait_gone(4.0), "processes are left"


def test_ranks_fail_on_all_hosts_and_one_is_told(runner: Runner) -> None:
    job = runner.run("-np", "4", "-H", "hosta:2,hostb:2", *FAILS, "all-exception")
    assert job.returncode == 1
    assert job.stderr.count("Traceback") == job.stderr.count("ValueError: no such luck") == 1
    rank = re.search(r"hvdlite: rank (\d) on (host[ab]) failed: ValueError \[HVD903\]\n", job.stderr)
    assert rank and f"hvdliterun: rank {rank[1]} on {rank[2]} ended the job with exit code 1 [HVD903]\n" in job.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_ends_before_it_meets_those_of_other_hosts(runner: Runner, pair: Hosts, rank: int) -> None:
    code = f"import os; os.environ['HVDLITE_JOB_RANK'] == '{rank}' and os._exit(0); import hvdlite; hvdlite.init()"
    before = traces(pair)
    job = runner.run("-H", "hosta:1,hostb:1", sys.executable, "-c", code)
    assert job.returncode == 1
    told = f"rank {rank} on host{'ab'[rank]} ended without hvd.init(), where other ranks wait: every rank must call hvd.init() [HVD906]"
    assert job.stderr.splitlines()[-1] == f"hvdliterun: {told}"
    assert runner.leftovers() == [] and traces(pair) == before


def start(runner: Runner, pair: Hosts, *flags: str) -> subprocess.Popen[str]:
    """A job whose ranks sleep, on both hosts."""
    process = runner.start("--no-prefix", *flags, "-H", "hosta:2,hostb:2", *SLEEPS)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ready"), process.stderr
    assert "hvdlite-" in pair[1].run("ls", "/tmp")
    return process


def processes(runner: Runner, what: str) -> list[int]:
    """Processes of this runner's jobs whose command line matches, outermost first."""
    return [pid for pid in sorted(runner.leftovers()) if re.match(what, command_line(pid))]


def mpiruns(runner: Runner) -> list[int]:
    """The MPI's launcher on the first host."""
    return processes(runner, rf"(\S*/)?({Path(runner.mpi.launcher).name}|prterun\S*|mpiexec\S*) ")


def environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:  # it is no more
        return ""


def daemons(machine: Machine) -> list[int]:
    """Open MPI's daemons on this machine. They have no mark; their arguments name the job's folder."""
    return running(machine, r"\S*(prted|orted) .*/hvdlite-")


def agents(machine: Machine) -> list[int]:
    """The agents on this machine."""
    return running(machine, AGENT)


def running(machine: Machine, pattern: str) -> list[int]:
    """The processes on this machine whose command line begins like this, as seen from outside."""
    here = os.readlink(f"/proc/{machine.process}/ns/pid")
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and re.match(pattern, command_line(int(name)))]
    return [pid for pid in pids if namespace(pid) == here]


def namespace(pid: int) -> str:
    """The namespace of a process' id; "" if the process has ended."""
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except FileNotFoundError:
        return ""


HVDLITERUN = r"\S*python\S* -m hvdlite_launcher"
AGENT = r"\S*python\S* -I -S -c .*agent import main"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_signal_to_hvdliterun(runner: Runner, pair: Hosts, number: int, code: int) -> None:
    before = traces(pair)
    job = start(runner, pair)
    (hvdliterun,) = processes(runner, HVDLITERUN)
    os.kill(hvdliterun, number)
    job.communicate(timeout=5.0)
    assert job.returncode == code
    assert runner.wait_gone(4.0), "processes are left"
    assert wait_until(lambda: traces(pair) == before, 2.0), traces(pair)


def test_mpirun_is_killed(runner: Runner, pair: Hosts) -> None:
    before = traces(pair)
    job = start(runner, pair)
    os.kill(mpiruns(runner)[0], signal.SIGKILL)
    _, err = job.communicate(timeout=5.0)
    assert job.returncode == 137, err
    assert runner.wait_gone(4.0), "processes are left"
    assert wait_until(lambda: traces(pair) == before, 2.0), traces(pair)


def test_an_agent_is_killed(runner: Runner, pair: Hosts) -> None:
    """A successor comes to its host and does its work."""
    before = traces(pair)
    job = start(runner, pair)
    (agent,) = agents(pair[1])
    os.kill(agent, signal.SIGKILL)
    _, err = job.communicate(timeout=5.0)
    assert job.returncode == 137 and "hvdliterun: host hostb was lost: the connection broke [HVD909]\n" in err
    assert runner.wait_gone(4.0), "processes are left"
    assert wait_until(lambda: traces(pair) == before, 2.0), traces(pair)


def test_a_host_is_cut_off(runner: Runner) -> None:
    """Its cable is pulled. Within five seconds both sides notice, and end their processes."""
    with hosts(2) as pair:
        runner.prefix = pair[0].command([])
        before = traces(pair)
        job = start(runner, pair, "--host-timeout", "3.5")
        begun = time.monotonic()
        pair.unplug(pair[1])
        _, err = job.communicate(timeout=10.0)
        assert (
            job.returncode == 137
            and "hvdliterun: host hostb was lost: no sign of life for 3.5 s (--host-timeout) [HVD909]\n" in err
        )
        assert runner.wait_gone(5.0), "processes are left"
        assert time.monotonic() - begun < 7.0  # the five seconds, and two for a busy machine
        assert wait_until(lambda: not any(map(daemons, pair.machines)), 2.0), "Open MPI's daemon is left"
        assert wait_until(lambda: traces(pair) == before, 2.0), traces(pair)


def test_a_network_that_rests_longer_than_usual(runner: Runner) -> None:
    """The job goes on, and hvdliterun prints a line about it."""
    with hosts(2) as pair:
        runner.prefix = pair[0].command([])
        job = start(runner, pair)
        (hvdliterun,) = processes(runner, HVDLITERUN)
        pair.unplug(pair[1])
        time.sleep(START_HOST_TIMEOUT + 4.0)
        pair.plug_in(pair[1])
        time.sleep(START_HOST_TIMEOUT + 4.0)  # TCP tries again only now and then
        assert job.poll() is None and "hvdlite-" in pair[1].run("ls", "/tmp")
        os.kill(hvdliterun, signal.SIGTERM)
        _, err = job.communicate(timeout=5.0)
        assert job.returncode == 143 and runner.wait_gone(4.0)
        told = f"no sign of life for 5 s; the job ends if it stays silent for {HOST_TIMEOUT:.0f} s in all (--host-timeout) [HVD909]"
        lines = [f"hvdliterun: host hostb: {text}" for text in (told, "it answers again")]
        assert [line for line in err.splitlines() if "host hostb" in line] == lines, err


def test_a_host_is_cut_off_before_ranks_start(runner: Runner, tmp_path: Path) -> None:
    """The job ends soon: no work is lost."""
    with hosts(2, shared=[tmp_path]) as pair:
        runner.prefix = pair[0].command([])
        mpi = tmp_path / "mpirun"
        mpi.write_text(
            f"#!/bin/sh\ntest $# = 1 && exec {runner.mpi.launcher} $1\ntouch {tmp_path}/begun\nexec sleep 60\n"
        )
        mpi.chmod(0o755)
        runner.mpi = replace(runner.mpi, launcher=str(mpi))
        job = runner.start("-H", "hosta:1,hostb:1", *SLEEPS)
        assert wait_until((tmp_path / "begun").exists, 15.0)
        pair.unplug(pair[1])
        begun = time.monotonic()
        _, err = job.communicate(timeout=20.0)
        assert job.returncode == 1 and "host hostb was lost: no sign of life for 3.5 s" in err, err
        assert time.monotonic() - begun < 8.0


def test_a_suspended_launcher_is_not_taken_for_dead(runner: Runner, pair: Hosts) -> None:
    """Ctrl-Z suspends hvdliterun for longer than the agents' patience; then the job goes on."""
    job = start(runner, pair, "--host-timeout", f"{START_HOST_TIMEOUT}")
    (hvdliterun,) = processes(runner, HVDLITERUN)
    os.kill(hvdliterun, signal.SIGTSTP)
    assert wait_until(lambda: state(hvdliterun) == "T", 2.0)
    time.sleep(START_HOST_TIMEOUT + 1.5)
    assert state(hvdliterun) == "T" and "hvdlite-" in pair[1].run("ls", "/tmp")
    job.send_signal(signal.SIGCONT)  # nsenter stops and goes on with it
    time.sleep(1.5)
    assert job.poll() is None and "hvdlite-" in pair[1].run("ls", "/tmp")
    os.kill(hvdliterun, signal.SIGTERM)
    job.communicate(timeout=5.0)
    assert job.returncode == 143 and runner.wait_gone(4.0)


def test_a_machine_that_stood_still_loses_nobody(runner: Runner, pair: Hosts) -> None:
    """A virtual machine with all hosts stands still while it is moved, for longer than the patience of all."""
    job = start(runner, pair, "--host-timeout", f"{START_HOST_TIMEOUT}")
    frozen = [*processes(runner, HVDLITERUN), *agents(pair[1])]
    assert len(frozen) == 2
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in frozen:
            os.kill(process, number)
        time.sleep(START_HOST_TIMEOUT + 1.5 if number == signal.SIGSTOP else 1.5)
    job.send_signal(signal.SIGCONT)  # nsenter has stopped with it
    assert job.poll() is None and "hvdlite-" in pair[1].run("ls", "/tmp")
    os.kill(frozen[0], signal.SIGTERM)
    job.communicate(timeout=5.0)
    assert job.returncode == 143 and runner.wait_gone(4.0)


def state(pid: int) -> str:
    """The kernel's letter for the state of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
