"""The trial of an MPI: its launcher, its environment, and its cached result."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdlite.system import launcher_environment
from hvdlite.transports import cuda_aware
from tests.pretend import cupy


def test_the_launcher_lies_beside_the_library(tmp_path: Path) -> None:
    (tmp_path / "lib" / "openmpi").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "mpirun"
    launcher.write_text("#!/bin/sh\n")
    launcher.chmod(0o755)
    for library in ("lib/libmpi.so.40", "lib/openmpi/libmpi.so"):
        assert cuda_aware.launcher_of(str(tmp_path / library)) == str(launcher)


def test_what_a_launcher_tells_need_be_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launcher_environment.told()
    monkeypatch.setenv("SLURM_JOB_NAME", os.fsdecode(b"caf\xe9"))
    assert launcher_environment.told() != before


def test_which_files_are_an_mpi() -> None:
    for path in ("/usr/lib/libmpi.so.40", "/opt/mpich/lib/libmpich.so.12", "/x/libmpi.so"):
        assert cuda_aware.is_mpi(path)
    for path in ("/usr/lib/libmpi_mpifh.so", "[heap]", "/usr/lib/libm.so.6", "libmpi.so"):
        assert not cuda_aware.is_mpi(path)


def test_the_trial_sees_no_launcher_but_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of a job that a rank starts has the user's MPI settings, and not the launcher's variables."""
    gone = ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_FD", "SLURM_PROCID", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess",
            "PRTE_LAUNCHED", "HVDLITE_ALGORITHM"]  # fmt: skip
    kept = ["OMPI_MCA_opal_cuda_support", "UCX_TLS", "CUDA_VISIBLE_DEVICES", "OPAL_PREFIX"]
    for name in (*gone, *kept):
        monkeypatch.setenv(name, "7")
    found = launcher_environment.fresh_environment("/ours")
    assert not [name for name in gone if name in found] and all(found[name] == "7" for name in kept)
    assert found["PYTHONPATH"].split(":")[-1] == "/ours"
    assert {"OMPI_MCA_opal_cuda_support=7", "UCX_TLS=7"} <= set(launcher_environment.mpi_settings())
    assert not [line for line in launcher_environment.mpi_settings() if "orte" in line or "_ess" in line]


def test_an_answer_is_kept_for_the_same_facts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The answer is kept per library, driver and MPI settings, for later processes too.

    If no file can be written, it is kept for this process.
    """
    asked: list[str] = []
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_aware, "trial", lambda library: asked.append(library) or library == "good")
    for _ in range(3):
        cuda_aware.answer.cache_clear()  # like in a new process
        assert cuda_aware.cuda_aware("good") and not cuda_aware.cuda_aware("bad")
    assert asked == ["good", "bad"]
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert cuda_aware.cuda_aware("good") and asked == ["good", "bad", "good"]
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    cuda_aware.answer.cache_clear()
    assert cuda_aware.cuda_aware("good") and cuda_aware.cuda_aware("good") and len(asked) == 4
    cuda_aware.answer.cache_clear()


@pytest.mark.parametrize(
    ("says", "code", "found"),
    [
        ([cuda_aware.STARTED, cuda_aware.PASSED], 0, True),
        ([cuda_aware.STARTED], 1, False),
        (["out of memory"], 1, None),  # this says nothing about the MPI
    ],
)
def test_what_a_trial_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: list[str], code: int, found: bool | None
) -> None:
    launcher = tmp_path / "mpirun"
    launcher.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" * 2 for line in says) + f"exit {code}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(cuda_aware, "launcher_of", lambda library: str(launcher))
    assert cuda_aware.trial("MPI") is found


def test_without_a_launcher_the_answer_is_no_for_now(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cuda_aware, "launcher_of", lambda library: None)
    assert cuda_aware.cuda_aware("Open MPI v4.1.4") is False
    assert not list(tmp_path.rglob("*.json"))
    cuda_aware.answer.cache_clear()
