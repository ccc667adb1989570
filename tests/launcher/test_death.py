"""Whatever ends a job, no process, folder or shared-memory file is left after two or three seconds. After a signal,
ranks have SIGNAL_GRACE to save their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from hvdlite_launcher import agent, wire

from tests.launcher.conftest import ROOT, SCRIPTS, Runner, wait_until

SLEEPS = (sys.executable, str(SCRIPTS / "sleeps.py"))


@dataclass
class Running:
    """A job whose ranks sleep. traces: what must be gone when it has ended."""

    process: subprocess.Popen[str]
    traces: list[Path]

    @property
    def children(self) -> list[int]:
        """The children of hvdliterun: mpirun and the agent."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    @property
    def mpirun(self) -> int:
        """The child of hvdliterun that has the job's mark."""
        environs = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in self.children}
        return next(pid for pid, environ in environs.items() if b"HVDLITE_JOB_ID=" in environ)

    def kept(self) -> list[Path]:
        return [path for path in self.traces if path.exists()]


def start(runner: Runner, *arguments: str) -> Running:
    process = runner.start("-np", "2", "--no-prefix", *SLEEPS, *arguments)
    assert process.stdout is not None
    word, folder, *segments = process.stdout.readline().split()
    assert word == "ready"
    traces = [Path(folder), Path("/dev/shm", Path(folder).name), *map(Path, segments)]
    assert bool(segments) == runner.has_segments and all(path.exists() for path in traces)
    return Running(process, traces)


def end(runner: Runner, job: Running, seconds: float = 4.0) -> int:
    job.process.communicate(timeout=seconds)
    assert runner.wait_gone(), "processes are left"
    assert wait_until(lambda: not job.kept(), 2.0), f"left: {job.kept()}"
    return job.process.returncode


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
)
def test_a_signal_to_hvdliterun(runner: Runner, number: int, code: int) -> None:
    job = start(runner)
    job.process.send_signal(number)
    assert end(runner, job) == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_do_not_listen_are_killed(runner: Runner, number: int) -> None:
    """The ranks have five seconds."""
    job = start(runner, "deaf")
    job.process.send_signal(number)
    assert not wait_until(lambda: job.process.poll() is not None, 4.5)
    assert end(runner, job) == 128 + number


def test_a_second_ctrl_c_does_not_wait(runner: Runner) -> None:
    job = start(runner, "deaf")
    job.process.send_signal(signal.SIGINT)
    assert not wait_until(lambda: job.process.poll() is not None, 0.3)
    job.process.send_signal(signal.SIGINT)
    assert wait_until(lambda: job.process.poll() is not None, 0.7)
    assert end(runner, job) == 130


def test_mpirun_is_killed(runner: Runner) -> None:
    job = start(runner)
    os.kill(job.mpirun, signal.SIGKILL)
    assert end(runner, job) == 137


def test_a_rank_is_killed(runner: Runner) -> None:
    job = start(runner)
    rank = int(Path(job.traces[0], "pid.1").read_text())
    os.kill(rank, signal.SIGKILL)
    assert end(runner, job) == 137


def test_ranks_die_with_mpirun_even_without_an_agent(runner: Runner) -> None:
    job = start(runner)
    mpirun = job.mpirun
    (agent,) = set(job.children) - {mpirun}
    os.kill(agent, signal.SIGKILL)
    os.kill(mpirun, signal.SIGKILL)
    assert job.process.wait(timeout=4.0) == 137
    assert runner.wait_gone()
    kept = job.kept()
    assert not any(path.is_dir() for path in kept)  # hvdliterun has had another one do its work
    for path in kept:  # MPICH's segment, of which only the first one knew
        path.unlink()


def test_a_daemon_that_comes_after_the_end_leaves_no_folder(tmp_path: Path) -> None:
    """Open MPI's daemon comes to a host where no rank has started, and makes the job's folder again."""
    folder = tmp_path / "job"
    wanted: dict[str, object] = {"command": ["true"], "interfaces": [], "env": {}, "patience": [3.5, 60.0]}
    folders = {"folder": str(folder), "shared": None, "cwd": "/", "parts": True, "whole": False, "ranks": 1}
    job = {"id": "job", "successor": False, **folders, **wanted}
    argv = agent.command(sys.executable, str(ROOT / "launcher"))
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        process.stdin.write(wire.message(job=job))
        process.stdin.flush()
        assert wait_until(folder.exists, 5.0)
        process.stdin.write(wire.message(end=1))
        process.stdin.flush()
        assert b"gone" in process.stdout.read() and not folder.exists()
        folder.mkdir()
        assert wait_until(lambda: not folder.exists(), 2.0)


@pytest.mark.parametrize(("number", "shell"), [
    (signal.SIGINT, []), (signal.SIGTERM, []), (signal.SIGTERM, ["sh", "-c", '"$@"; exit $?', "sh"]),
])  # fmt: skip
def test_a_rank_has_time_to_save(runner: Runner, number: int, shell: list[str]) -> None:
    """The other ranks end at once, because only rank 0 saves. Its signal handler runs once. A shell between keeper and
    rank does not receive the signal, which would end both."""
    code = (
        "import os, signal, sys, time, hvdlite\n"
        "def save(*_):\n    os.write(1, b'saving\\n'); time.sleep(1.5); os.write(1, b'saved\\n'); sys.exit(0)\n"
        "hvdlite.init()\n"
        f"if hvdlite.rank() == 0: signal.signal({int(number)}, save)\n"
        "hvdlite.barrier(); os.write(1, b'ready\\n'); time.sleep(30)"
    )
    job = runner.start("-np", "3", "--no-prefix", *shell, sys.executable, "-c", code)
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(3)] == ["ready\n"] * 3
    begun = time.monotonic()
    job.send_signal(number)
    out, _ = job.communicate(timeout=8)
    assert (out, job.returncode) == ("saving\nsaved\n", 128 + number)
    assert time.monotonic() - begun < 4.0  # the five seconds are not waited for
    assert runner.wait_gone()


@pytest.mark.parametrize("algorithm", ["ring", "shared"])
def test_a_rank_can_save_that_waits_for_one_that_has_left(runner: Runner, algorithm: str) -> None:
    """It waits in a collective that the other rank's signal handler has left."""
    code = (
        f"import os, time; os.environ['HVDLITE_ALGORITHM'] = '{algorithm}'\n"
        "import numpy, hvdlite\n"
        "from hvdlite.transports import mpi\n"
        "hvdlite.init(); rank = hvdlite.rank(); x = numpy.ones(1000); hvdlite.allreduce(x)\n"
        "def left(*_): os.write(1, b'left\\n'); time.sleep(30)\n"
        "if rank == 1: mpi.MpiTransport.exchange = mpi.MpiTransport.barrier = left\n"
        "try: hvdlite.allreduce(x)\n"
        "except KeyboardInterrupt: os.write(1, f'saved {rank}\\n'.encode())"
    )
    job = runner.start("-np", "2", "--no-prefix", sys.executable, "-c", code)
    assert job.stdout is not None and job.stdout.readline() == "left\n"
    time.sleep(0.5)  # rank 0 waits, too
    job.send_signal(signal.SIGINT)
    out, _ = job.communicate(timeout=8)
    assert (sorted(out.split("\n")), job.returncode) == (["", "saved 0", "saved 1"], 130)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_signals_with_a_meaning_reach_the_ranks(runner: Runner, number: int) -> None:
    code = (
        f"import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, {{{int(number)}}}); os.write(1, b'ready\\n')\n"
        f"signal.sigwait({{{int(number)}}}); os.write(1, b'got it\\n')"
    )
    job = runner.start("-np", "2", "--no-prefix", sys.executable, "-c", code)
    assert job.stdout is not None
    assert [job.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    job.send_signal(number)
    out, _ = job.communicate(timeout=5)
    assert (out, job.returncode) == ("got it\n" * 2, 0)


def test_under_nohup_a_hangup_ends_nothing(runner: Runner) -> None:
    runner.prefix = ["nohup"]
    code = "import time; print('here', flush=True); time.sleep(1); print('done')"
    job = runner.start("-np", "1", "--no-prefix", sys.executable, "-c", code)
    assert job.stdout and job.stdout.readline() == "here\n"
    job.send_signal(signal.SIGHUP)
    out, _ = job.communicate(timeout=10)
    assert (out, job.returncode) == ("done\n", 0)


def test_who_was_killed_is_told_though_another_learns_of_it_at_once(runner: Runner) -> None:
    """gloo, for example, raises an error at once, which is not the first failure."""
    code = (
        "import os, pathlib, time, hvdlite; hvdlite.init(); rank = hvdlite.rank()\n"
        "peer = hvdlite.allgather_object(os.getpid())[1]\n"
        "if rank == 1: time.sleep(0.3); os.kill(peer, 9)\n"
        "stat = pathlib.Path(f'/proc/{peer}/stat')\n"
        "while stat.exists() and ') Z ' not in stat.read_text(): pass\n"
        "raise ConnectionError"
    )
    job = runner.run("-np", "2", sys.executable, "-c", code)
    assert job.returncode == 137 and "rank 1 was killed by SIGKILL" in job.stderr, job.stderr


def test_shared_memory_of_the_users_goes_too(runner: Runner) -> None:
    """Shared memory that Python's resource tracker removes when its process is killed."""
    code = (
        "import os, time; from multiprocessing import shared_memory as s; m = s.SharedMemory(create=True, size=9)\n"
        "print(m.name, flush=True); time.sleep(0.5); os.kill(os.getpid(), 9) if os.environ['HVDLITE_JOB_RANK'] == '1' else time.sleep(30)"
    )
    job = runner.run("-np", "2", "--no-prefix", sys.executable, "-c", code)
    assert job.returncode == 137
    files = [Path("/dev/shm", name) for name in job.stdout.split()]
    assert len(files) == 2
    assert wait_until(lambda: not any(file.exists() for file in files), 3.0)
    assert runner.wait_gone()


def test_shared_memory_of_joblibs_goes_too(runner: Runner) -> None:
    """joblib has its own resource tracker."""
    code = (
        "import os, glob, numpy, joblib\n"
        "with joblib.Parallel(2) as parallel:\n"
        "    parallel(joblib.delayed(numpy.sum)(numpy.ones(1_000_000)) for _ in range(2))\n"
        "    print(*glob.glob(f'/dev/shm/joblib_memmapping_folder_{os.getpid()}_*'), flush=True)\n"
        "    os.kill(os.getpid(), 9)"
    )
    job = runner.run("-np", "1", "--no-prefix", sys.executable, "-c", code)
    folders = [Path(name) for name in job.stdout.split()]
    assert job.returncode == 137 and folders
    assert wait_until(lambda: not any(folder.exists() for folder in folders), 5.0)
    assert runner.wait_gone()


def test_nobody_reads_our_output(runner: Runner) -> None:
    job = runner.start("-np", "2", "yes")
    assert job.stdout is not None
    job.stdout.readline()
    job.stdout.close()
    assert job.wait(timeout=4.0) == 128 + signal.SIGPIPE
    assert runner.wait_gone()


def test_a_rank_alone_is_killed(runner: Runner) -> None:
    """The MPI's shared memory has no name any more: no other rank needs it."""
    code = (
        "import os, hvdlite; hvdlite.init(); maps = open('/proc/self/maps').read()\n"
        "print(*(line.split()[5] for line in maps.splitlines() if '/dev/shm/' in line), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    job = runner.plain(1, sys.executable, "-c", code)
    assert job.returncode
    assert not [word for word in job.stdout.split() if word.startswith("/dev/shm/") and os.path.exists(word)]


def test_plain_mpirun_is_killed_and_guarded_ranks_die(runner: Runner) -> None:
    """`job.exits` does that without hvdliterun. The names of the MPI's segments have been removed before."""
    argv, env = runner.plain_command(2, sys.executable, str(SCRIPTS / "fails.py"), "wait")
    mpirun = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    assert mpirun.stdout is not None
    word, *segments = mpirun.stdout.readline().split()
    assert word == "waiting" and bool(segments) == runner.has_segments
    mpirun.kill()
    mpirun.communicate()
    assert runner.wait_gone()
    assert [path for path in segments if os.path.exists(path)] == []
