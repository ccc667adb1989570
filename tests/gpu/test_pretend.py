"""The real device-pointer paths of a CUDA-aware Open MPI, and ours, on a CPU: see tests/pretend.

HVDLITE_TEST_CUDA_MPI names that MPI's prefix; `.ci/run` sets it where there is one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.gpu import jobs
from tests.parallel.jobs import explain

pytestmark = pytest.mark.skipif(
    not jobs.PREFIX or not shutil.which("cc"),
    reason="NOT RUN: DEVICE POINTERS THROUGH MPI. HVDLITE_TEST_CUDA_MPI names no CUDA-aware Open MPI, or there is no cc",
)


def require(checks: list[str], size: int, tmp_path: Path, **extra: str) -> None:
    result = jobs.run(size, checks, True, {"XDG_CACHE_HOME": str(tmp_path), **extra})
    assert result.ended_well(), explain(result, checks[0])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_device_arrays(size: int, tmp_path: Path) -> None:
    handles = "pretend_driver.check_opened_handles_are_closed"
    require(["device_arrays", handles, "pretend_driver.check_the_verdict"], size, tmp_path)


def test_an_mpi_without_cuda_support(tmp_path: Path) -> None:
    """The trial ends with a crash, in processes of its own; the job goes on with staged messages."""
    require(["pretend_driver.check_the_verdict"], 2, tmp_path, OMPI_MCA_opal_cuda_support="0", WITHOUT_CUDA_SUPPORT="1")


def test_refused_ipc_handles(tmp_path: Path) -> None:
    require(["pretend_driver.check_refused_handles"], 3, tmp_path, PRETEND_CUDA_NO_IPC="1")
