"""hvdlite's GPU code and a CUDA-aware Open MPI's, on a machine without a GPU: see tests/pretend.

HVDLITE_TEST_CUDA_MPI is the prefix of that MPI. `.ci/run` sets it if there is one.
"""

from __future__ import annotations

import importlib.util
import json
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
    result = jobs.run_checks(size, checks, True, {"XDG_CACHE_HOME": str(tmp_path), **extra})
    assert result.ended_well(), explain(result, checks[0])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_device_arrays(size: int, tmp_path: Path) -> None:
    handles = "gpu/pretend_driver.check_opened_handles_are_closed"
    require(["gpu/device_arrays", handles, "gpu/pretend_driver.check_the_verdict"], size, tmp_path)


def test_an_mpi_without_cuda_support(tmp_path: Path) -> None:
    """The trial crashes in its own processes, and the job uses staged messages."""
    require(
        ["gpu/pretend_driver.check_the_verdict"], 2, tmp_path, OMPI_MCA_opal_cuda_support="0", WITHOUT_CUDA_SUPPORT="1"
    )


def test_refused_ipc_handles(tmp_path: Path) -> None:
    require(["gpu/pretend_driver.check_refused_handles"], 3, tmp_path, PRETEND_CUDA_NO_IPC="1")


@pytest.mark.parametrize("size", [2, 3])
def test_torch(size: int, tmp_path: Path) -> None:
    """The torch checks of tests/parallel, with gradients in the pretend driver's memory."""
    checks = [
        f"torch_{what}"
        for what in ("gradients", "parameters", "collectives", "dtypes", "batch_norm", "state", "sharded")
    ]
    way = {"HVDLITE_ALGORITHM": "ring"} if size == 3 else {}
    last = "gpu/pretend_driver.check_torch_gradients_lie_on_the_device"
    require([*checks, last], size, tmp_path, TORCH_TENSORS_ON="pretend", **way)


@pytest.mark.skipif(
    not importlib.util.find_spec("tensorflow"), reason="NOT RUN: TENSORFLOW ON A GPU. It is not installed"
)
def test_tensorflow(tmp_path: Path) -> None:
    """TensorFlow checks of tests/parallel, with tensors that count as GPU memory."""
    collectives = [f"tensorflow_collectives.check_{name}" for name in (
        "allreduce", "dtypes", "gradients", "mismatch_is_failed_precondition", "reducescatter", "indexed_slices",
    )]  # fmt: skip
    options = [
        f"tensorflow_options.check_{name}"
        for name in ("sparse_gradients", "several_passes_per_step", "mixed_precision")
    ]
    last = "gpu/pretend_driver.check_tensorflow_gradients_lie_on_the_device"
    require([*collectives, "tensorflow_training", *options, last], 2, tmp_path, TENSORFLOW_TENSORS_ON="pretend")


@pytest.mark.skipif(
    not importlib.util.find_spec("keras"), reason="NOT RUN: KERAS ON TORCH ON A GPU. It is not installed"
)
def test_keras_on_torch(tmp_path: Path) -> None:
    last = "gpu/pretend_driver.check_keras_gradients_lie_on_the_device"
    require(
        ["backends_keras.check_mixed_precision_skips_together", last],
        2,
        tmp_path,
        KERAS_BACKEND="torch",
        TORCH_TENSORS_ON="pretend",
    )


def test_benchmark(tmp_path: Path) -> None:
    """Every contender computes the right sums of device arrays. Its times mean nothing on a pretend GPU."""
    contenders = "ipc,ring,ring_whole,halving_doubling,staged,auto,mpi,mpi_host,copy"
    options = ["--device", "cuda", "--min", "4K", "--max", "64K", "--iters", "1", "--algorithms", contenders]
    arguments = ["-m", "hvdlite.bench", "allreduce", *options, "--json", str(tmp_path / "found.json")]
    result = jobs.run(2, arguments, True, {"XDG_CACHE_HOME": str(tmp_path)})
    assert result.code == 0, result.output
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["nbytes"] for row in rows] == [4096, 16384, 65536]
    assert all(sorted(row["seconds"]) == sorted(contenders.split(",")) for row in rows)
