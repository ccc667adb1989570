"""The checks that need a GPU. `python -m tests.gpu` runs these checks without pytest, and also benchmarks."""

from __future__ import annotations

import shutil

import pytest

from tests.gpu import jobs
from tests.gpu.__main__ import CHECKS, Row, failures, program_failures

pytestmark = pytest.mark.skipif(
    not jobs.PREFIX or not shutil.which("nvidia-smi"),
    reason="NOT RUN: EVERYTHING ON A GPU. There is none here, or HVDLITE_TEST_CUDA_MPI names no CUDA-aware Open MPI",
)


@pytest.mark.parametrize("row", CHECKS, ids=lambda row: f"{row.name} {row.size}")
def test_on_gpu(row: Row) -> None:
    found = failures(row) if row.checks else program_failures(row)
    if found:
        pytest.fail("\n".join(found), pytrace=False)
