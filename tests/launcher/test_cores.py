"""The number of threads of a rank: its share of its host's cores."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path

import pytest
from hvdlite_launcher import cores

from tests.launcher.conftest import Runner

OPEN_MPI, HYDRA = "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"
SLURM = {"SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),4"}
ALL = set(range(64))


@pytest.mark.parametrize(("mine", "daemons", "environ", "threads"), [
    (ALL, ALL, {OPEN_MPI: "4"}, 16),
    (ALL, ALL, {HYDRA: "4", "HVDLITE_JOB_SLOTS": "8"}, 16),  # what the MPI has done, not what we think
    (ALL, ALL, {OPEN_MPI: "100"}, 1),
    ({0}, {0}, {OPEN_MPI: "1"}, 1),
    (ALL, ALL, {"HVDLITE_JOB_SLOTS": "8"}, 8),
    (ALL, ALL, {}, 64),
    ({0}, ALL, {OPEN_MPI: "4"}, 1),  # bound to a core by the MPI
    (set(range(16)), ALL, {OPEN_MPI: "4"}, 16),  # to its own quarter
    (set(range(32)), ALL, {OPEN_MPI: "8"}, 8),  # to a socket, as three others
    (ALL, ALL, {OPEN_MPI: "4", "SLURM_CPUS_PER_TASK": "6"}, 6),  # on a host whose other cores are others'
    (ALL, ALL, {OPEN_MPI: "4", "SLURM_CPUS_PER_TASK": "32"}, 16),  # given to one task, in which four ranks were started
    (set(range(16)), ALL, SLURM, 4),  # slurmstepd may use the whole host
    (ALL, ALL, {**SLURM, "SLURM_CPUS_ON_NODE": "32"}, 8),
    (ALL, ALL, {**SLURM, "SLURM_CPUS_ON_NODE": "32", "SLURM_CPUS_PER_TASK": "2"}, 2),
    (ALL, ALL, {"SLURM_NODEID": "7", "SLURM_TASKS_PER_NODE": "2", "HVDLITE_JOB_SLOTS": "2"}, 32),
    (ALL, ALL, {"SLURM_NODEID": "0", "SLURM_TASKS_PER_NODE": "many"}, 64),
])  # fmt: skip
def test_a_ranks_share(
    monkeypatch: pytest.MonkeyPatch, mine: set[int], daemons: set[int], environ: dict[str, str], threads: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: daemons if pid else mine)
    monkeypatch.setattr(cores, "quota", lambda: math.inf)
    assert cores.threads(environ) == threads


@pytest.mark.parametrize(("quota", "threads"), [(1.5, 1), (2.5, 1), (4.0, 2), (math.inf, 32), (0.5, 1)])
def test_a_containers_share_is_shared_too(monkeypatch: pytest.MonkeyPatch, quota: float, threads: int) -> None:
    """The share is rounded up before it is divided."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: ALL)
    monkeypatch.setattr(cores, "quota", lambda: quota)
    assert cores.threads({OPEN_MPI: "2"}) == threads


@pytest.mark.parametrize(("files", "own", "quota"), [
    ({"cpu.max": "max 100000\n"}, "0::/\n", math.inf),
    ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
    ({}, "0::/\n", math.inf),
    ({}, "", math.inf),
    ({"user/job/cpu.max": "max 100000\n", "user/cpu.max": "250000 100000\n"}, "0::/user/job\n", 2.5),
    ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", math.inf),
    ({"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 0.5),
    ({"cpu,cpuacct/a/cpu.cfs_quota_us": "300000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
     "7:memory:/x\n4:cpu,cpuacct:/a/b\n", 3.0),
])  # fmt: skip
def test_what_control_groups_say(tmp_path: Path, files: dict[str, str], own: str, quota: float) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cores.quota(str(tmp_path), str(tmp_path / "own")) == quota


PRINT = (sys.executable, "-c", "import os; print(os.environ['OMP_NUM_THREADS'])")


def test_ranks_of_one_host_share_its_cores(runner: Runner) -> None:
    mine = min(len(os.sched_getaffinity(0)), math.ceil(min(cores.quota(), 1e6)))
    for ranks in (1, 2, 3):
        job = runner.run("--no-prefix", "-np", str(ranks), *PRINT)
        assert (job.returncode, job.stdout) == (0, f"{max(1, mine // ranks)}\n" * ranks), job.stderr


def test_fewer_cores_are_fewer_threads(runner: Runner) -> None:
    runner.prefix = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    assert runner.run("--no-prefix", "-np", "1", *PRINT).stdout == "1\n"


def test_the_users_number_wins(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert runner.run("--no-prefix", "-np", "1", *PRINT).stdout == "7\n"
    assert runner.run("--no-prefix", "-np", "1", "-x", "OMP_NUM_THREADS=3", *PRINT).stdout == "3\n"
