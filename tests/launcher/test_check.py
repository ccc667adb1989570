"""`hvdliterun --check`: what it says agrees with what is there."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import hvdlite
from hvdlite import check
from tests.launcher.conftest import Runner


def test_the_report_says_what_is_there(runner: Runner) -> None:
    job = runner.run("--check", limit=60)
    assert job.returncode == 0 and not job.stderr, job.stderr
    lines = job.stdout.splitlines()
    assert lines[0] == f"hvdlite {hvdlite.__version__} ({Path(hvdlite.__file__).parent})"
    for title in ("Frameworks:", "MPI:", "GPUs:", "This host:", "Schedulers:", "Libraries:"):
        assert title in lines
    assert f"    [X] launcher: {runner.mpi}" in lines
    assert any(line.startswith(f"    [X] library: {runner.library}") for line in lines), job.stdout
    assert "    [X] MPI_THREAD_MULTIPLE" in lines
    assert f"    [X] numpy {metadata.version('numpy')}" in lines
    assert any("CUDA-aware: " in line for line in lines)


def test_horovodruns_flag_does_the_same_and_leaves_nothing(runner: Runner) -> None:
    before = segments()
    assert runner.run("-cb", limit=60).stdout.startswith("hvdlite ")
    assert segments() <= before


def segments() -> set[Path]:
    """Open MPI's shared memory."""
    return {*Path("/dev/shm").glob("sm_segment.*"), *Path("/dev/shm").glob("vader_segment.*")}


def test_a_broken_mpi_is_told(runner: Runner) -> None:
    env = {**runner.env(), "MPI4PY_LIBMPI": "/no/such/libmpi.so"}
    command = [sys.executable, "-m", "hvdlite.check"]
    job = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert job.returncode == 0
    assert "    [ ] library: " in job.stdout and "/no/such/libmpi.so" in job.stdout, job.stdout


def test_what_is_not_installed_has_no_version() -> None:
    assert check.installed("no_such_module") is None
    assert check.installed("numpy") == metadata.version("numpy")
