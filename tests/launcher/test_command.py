"""The command for each MPI. It depends on the settings alone, not on the machine."""

from __future__ import annotations

import dataclasses

import pytest
from hvdlite_launcher import UsageError
from hvdlite_launcher.command import Job, Settings, compose
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.probe import Family, Mpi, identify

JOB = Job("job", "/tmp/job", "/dev/shm/job", ("keep",), launched=2.5)
SETTINGS = Settings(4, (Host("localhost", 4),), ("python", "train.py", "--np", "3"))
OPEN_MPI_5 = Mpi("/mpi/bin/mpirun", Family.OPEN_MPI, (5, 0, 11), "/mpi/lib/libmpi.so.40", wheel=True)
OPEN_MPI_4 = Mpi("/usr/bin/mpirun", Family.OPEN_MPI, (4, 1, 4))
MPICH = Mpi("/mpich/bin/mpiexec", Family.MPICH, (5, 0, 2), "/mpich/lib/libmpi.so.12")
INTEL = Mpi("/intel/bin/mpiexec.hydra", Family.INTEL_MPI, (2021, 17), "/intel/lib/libmpi.so.12")

TAIL = ("keep", "python", "train.py", "--np", "3")
OPEN_MPI_OPTIONS = ("--host", "localhost:4", "--oversubscribe", "--bind-to", "none")
COMMON = {
    "HVDLITE_JOB_ID": "job",
    "HVDLITE_JOB_DIR": "/tmp/job",
    "PYTHONUNBUFFERED": "1",
    "HVDLITE_JOB_SLOTS": "4",
    "HVDLITE_LAUNCHED": "2.500",
}


def test_open_mpi_5_from_the_wheel() -> None:
    command = compose(SETTINGS, OPEN_MPI_5, JOB, {})
    assert command.argv == ("/mpi/bin/mpirun", "-np", "4", *OPEN_MPI_OPTIONS, *TAIL)
    assert command.env == {
        **COMMON,
        "MPI4PY_LIBMPI": "/mpi/lib/libmpi.so.40",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_btl": "self,sm,tcp",
        "OMPI_MCA_btl_sm_backing_directory": "/dev/shm/job",
        "OMPI_MCA_osc_sm_backing_directory": "/dev/shm/job",
        "PRTE_MCA_prte_tmpdir_base": "/tmp/job",
    }


def test_open_mpi_4_gets_its_own_names_and_no_fast_start() -> None:
    command = compose(SETTINGS, OPEN_MPI_4, JOB, {})
    assert command.argv == ("/usr/bin/mpirun", "-np", "4", *OPEN_MPI_OPTIONS, *TAIL)
    assert command.env == {
        **COMMON,
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_vader_backing_directory": "/dev/shm/job",
        "OMPI_MCA_osc_sm_backing_directory": "/dev/shm/job",
        "OMPI_MCA_orte_tmpdir_base": "/tmp/job",
    }


def test_an_open_mpi_5_of_the_cluster_keeps_its_fabrics() -> None:
    command = compose(SETTINGS, dataclasses.replace(OPEN_MPI_5, wheel=False), JOB, {})
    assert not {"OMPI_MCA_pml", "OMPI_MCA_btl"} & command.env.keys()


def test_mpich() -> None:
    command = compose(SETTINGS, MPICH, JOB, {})
    assert command.argv == (MPICH.launcher, "-n", "4", "-hosts", "localhost:4", *TAIL)
    assert command.env == {**COMMON, "MPI4PY_LIBMPI": MPICH.library}


def test_intel_mpi_reads_no_counts_behind_the_names_of_hosts() -> None:
    command = compose(SETTINGS, INTEL, JOB, {})
    hosts = "localhost,localhost,localhost,localhost"
    assert command.argv == (INTEL.launcher, "-hosts", hosts, "-ppn", "1", "-n", "4", *TAIL)
    assert command.env == {
        **COMMON,
        "MPI4PY_LIBMPI": INTEL.library,
        "I_MPI_PIN": "0",
        "I_MPI_SHM_FILE_PREFIX_4K": "/dev/shm/job",
        "I_MPI_SILENT_ABORT": "1",
        "I_MPI_THREAD_YIELD": "2",
    }


def test_root_must_be_allowed_by_open_mpi() -> None:
    root = dataclasses.replace(SETTINGS, root=True)
    assert "--allow-run-as-root" in compose(root, OPEN_MPI_5, JOB, {}).argv
    assert "--allow-run-as-root" not in compose(SETTINGS, OPEN_MPI_5, JOB, {}).argv
    assert compose(root, MPICH, JOB, {}).argv == compose(SETTINGS, MPICH, JOB, {}).argv


def test_what_the_user_has_set_is_not_touched() -> None:
    environ = {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_osc": "rdma", "OMP_NUM_THREADS": "7", "MPI4PY_LIBMPI": "x"}
    env = compose(SETTINGS, OPEN_MPI_5, JOB, environ).env
    assert not environ.keys() & env.keys()
    assert "OMPI_MCA_pml" not in env


def test_variables_of_the_command_line_win() -> None:
    settings = dataclasses.replace(SETTINGS, env={"OMP_NUM_THREADS": "3", "LR": "0.1"})
    env = compose(settings, MPICH, JOB, {"OMP_NUM_THREADS": "7"}).env
    assert (env["OMP_NUM_THREADS"], env["LR"]) == ("3", "0.1")


@pytest.mark.parametrize("mpi", [OPEN_MPI_5, MPICH, INTEL])
def test_mpi_args_stand_behind_ours_and_before_the_command(mpi: Mpi) -> None:
    argv = compose(dataclasses.replace(SETTINGS, mpi_args=("--mca", "btl", "tcp")), mpi, JOB, {}).argv
    assert argv[-len(TAIL) - 3 :] == ("--mca", "btl", "tcp", *TAIL)


def test_a_command_that_open_mpi_cannot_start_is_refused() -> None:
    long = dataclasses.replace(SETTINGS, command=("python", "train.py", *["x" * 99] * 1250))
    assert compose(long, MPICH, JOB, {}).argv[-1] == "x" * 99
    with pytest.raises(
        UsageError, match="the command and its arguments have 125016 bytes, but Open MPI accepts at most 125000"
    ):
        compose(long, OPEN_MPI_5, JOB, {})


def test_intel_mpi_binds_as_it_is_told() -> None:
    command = compose(dataclasses.replace(SETTINGS, binding_args=("-env", "I_MPI_PIN", "1")), INTEL, JOB, {})
    assert command.argv[-len(TAIL) - 3 :] == ("-env", "I_MPI_PIN", "1", *TAIL)
    assert "I_MPI_PIN" not in command.env


def test_without_shared_memory_the_mpi_chooses() -> None:
    env = compose(SETTINGS, OPEN_MPI_5, dataclasses.replace(JOB, shared=None), {}).env
    assert not [name for name in env if "backing" in name]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", (Family.OPEN_MPI, (5, 0, 11))),
        ("mpirun (Open MPI) 4.1.4\n", (Family.OPEN_MPI, (4, 1, 4))),
        ("HYDRA build details:\n    Version:                5.0.2\n", (Family.MPICH, (5, 0, 2))),
        ("HYDRA build details:\n    Version:     4.3.0b1\n", (Family.MPICH, (4, 3, 0))),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 2", (Family.INTEL_MPI, (2021, 13))),
        ("mpirun: command of some other tool 1.0", None),
    ],
)
def test_an_mpi_is_known_by_what_it_says(text: str, found: object) -> None:
    assert identify(text) == found
