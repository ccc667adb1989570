"""The variables of schedulers, and how each scheduler starts ranks. No scheduler is needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError, options
from hvdlite_launcher.cli import main
from hvdlite_launcher.command import Job, Settings, Step, compose
from hvdlite_launcher.cores import slurm_counts
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.schedulers import Starter, allocation, expand
from hvdlite_launcher.settings import settings

JOB = Job("job", "/tmp/job", "/dev/shm/job", ("keep",))
OPEN_MPI = Mpi("/mpi/bin/mpirun", Family.OPEN_MPI, (5, 0, 11))
MPICH = Mpi("/mpich/bin/mpiexec", Family.MPICH, (5, 0, 2))
SETTINGS = Settings(3, (Host("a", 2), Host("b", 1)), ("python", "train.py"))
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}


def bin_of(*names: str) -> object:
    return lambda name: f"/bin/{name}" if name in names else None


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("a1,b-2.net", ["a1", "b-2.net"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("r[1-2]-ib,login", ["r1-ib", "r2-ib", "login"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_slurms_host_lists(text: str, hosts: list[str]) -> None:
    assert list(expand(text)) == hosts


def test_slurms_counts() -> None:
    assert slurm_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="counts"):
        slurm_counts("2x3")


def test_slurm() -> None:
    found = allocation(SLURM, bin_of("srun"))  # type: ignore[arg-type]
    assert found and found.hosts == (Host("n1", 2), Host("n2", 2), Host("n3", 1))
    assert (found.starter, found.path) == (Starter.SRUN, "/bin/srun")


def test_lsf_with_and_without_jsrun() -> None:
    env = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch 1 c1 4 c2 4"}
    jsm = allocation(env, bin_of("jsrun"))  # type: ignore[arg-type]
    assert jsm and jsm.hosts == (Host("c1", 4), Host("c2", 4)) and jsm.starter is Starter.JSRUN
    alone = allocation({**env, "LSB_MCPU_HOSTS": "c1 1 c1 3"}, bin_of("jsrun"))  # type: ignore[arg-type]
    assert alone and alone.hosts == (Host("c1", 4),)
    plain = allocation(env, bin_of("blaunch"))  # type: ignore[arg-type]
    assert plain and plain.hosts[0] == Host("batch", 1) and plain.shell == "/bin/blaunch"


def test_pbs(tmp_path: Path) -> None:
    file = tmp_path / "nodes"
    file.write_text("a\na\nb\na\n")
    found = allocation({"PBS_NODEFILE": str(file)}, bin_of("pbs_tmrsh"))  # type: ignore[arg-type]
    assert found and found.hosts == (Host("a", 3), Host("b", 1)) and found.shell == "/bin/pbs_tmrsh"


def test_flux_and_none() -> None:
    flux = allocation({"FLUX_URI": "local:///x"}, bin_of("flux"))  # type: ignore[arg-type]
    assert flux and flux.hosts == () and flux.starter is Starter.FLUX
    assert allocation({}) is None


@pytest.mark.parametrize(
    "env",
    [
        {"SLURM_JOB_ID": "7"},
        {**SLURM, "SLURM_TASKS_PER_NODE": "2"},
        {**SLURM, "SLURM_JOB_NODELIST": "n[1-"},
        {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a"},
        {"PBS_NODEFILE": "/no/such/file"},
    ],
)
def test_an_allocation_that_cannot_be_read_is_named(env: Mapping[str, str]) -> None:
    with pytest.raises(UsageError, match=r"inside a job of.*Name them with -H"):
        allocation(env)


COMMANDS = [
    (
        Step(Starter.SRUN, "/bin/srun", "pmix"), OPEN_MPI,
        "/bin/srun --ntasks 3 --nodes 2 --distribution block --cpu-bind=none --mpi=pmix --kill-on-bad-exit=1 "
        "--label keep python train.py",
    ),
    (
        Step(Starter.SRUN, "/bin/srun", "pmi2"), MPICH,
        "/bin/srun --ntasks 3 --nodes 2 --distribution block --cpu-bind=none --mpi=pmi2 --kill-on-bad-exit=1 "
        "--label keep python train.py",
    ),
    (
        Step(Starter.JSRUN, "/bin/jsrun", "pmix"), OPEN_MPI,
        "/bin/jsrun --nrs 3 --tasks_per_rs 1 --rs_per_host 2 --cpu_per_rs 1 --bind none --stdio_mode prepended "
        "keep python train.py",
    ),
    (Step(Starter.FLUX, "/bin/flux", "pmix"), OPEN_MPI, "/bin/flux run -n 3 -o pmi=pmix --label-io keep python train.py"),
    (Step(Starter.FLUX, "/bin/flux", ""), MPICH, "/bin/flux run -n 3 --label-io keep python train.py"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "mpi", "command"), COMMANDS)
def test_each_scheduler_starts_ranks_in_its_way(step: Step, mpi: Mpi, command: str) -> None:
    composed = compose(dataclasses.replace(SETTINGS, step=step), mpi, JOB, {})
    assert composed.argv == tuple(command.split()) and composed.labelled
    assert "HVDLITE_JOB_HOSTS" not in composed.env
    assert not [name for name in composed.env if "backing" in name or "tmpdir" in name]


def test_binding_args_replace_ours() -> None:
    step = Step(Starter.SRUN, "/bin/srun", "pmix")
    own = dataclasses.replace(SETTINGS, step=step, binding_args=("--cpu-bind=cores",))
    assert compose(own, OPEN_MPI, JOB, {}).argv[:5] == ("/bin/srun", "--ntasks", "3", "--cpu-bind=cores", "--mpi=pmix")


def test_a_slurm_that_does_not_answer_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "srun").write_bytes(b"no program")
    (tmp_path / "srun").chmod(0o755)
    for name, value in {**SLURM, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    assert main(["-np", "2", "true"]) == 2
    err = capfd.readouterr().err
    assert "Slurm does not tell which MPIs it starts" in err and err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["-np", "2"], ["-np", "2", "--mpi"]])
def test_hosts_that_only_flux_knows_are_not_taken_for_this_one(arguments: list[str]) -> None:
    """Neither without the program `flux`, nor if the user asks for the MPI's launcher."""
    with pytest.raises(UsageError, match="inside a job of Flux only the program `flux` knows the hosts"):
        settings(options.parse([*arguments, "true"]), OPEN_MPI, {"FLUX_URI": "local:///x"})


def test_a_host_that_ssh_would_take_for_an_option(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a\n-oProxyCommand=x\n")
    with pytest.raises(UsageError, match="is no host's name"):
        allocation({"PBS_NODEFILE": str(tmp_path / "nodes")}, lambda program: None)
