"""Jobs on a real or pretend GPU, over a CUDA-aware Open MPI. HVDLITE_TEST_CUDA_MPI is the prefix of that MPI."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache

from tests.parallel.jobs import ROOT, Result, finished

PREFIX = os.environ.get("HVDLITE_TEST_CUDA_MPI", "")
PRETEND = ROOT / "tests" / "pretend"
SECONDS = 300


@cache
def pretend_driver() -> str:
    """The folder of the pretend libcuda.so.1, which is compiled at the first call."""
    folder = tempfile.mkdtemp(prefix="pretend-cuda-")
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", f"{folder}/libcuda.so.1", str(PRETEND / "cuda.c"), "-lpthread"],
        check=True,
    )
    return folder


def environment(pretend: bool, extra: Mapping[str, str]) -> dict[str, str]:
    """This process' environment without its settings of hvdlite and MPI. The CUDA-aware MPI is first on its paths."""
    kept = {name: value for name, value in os.environ.items()
            if not name.startswith(("HVDLITE_", "HOROVOD_", "OMPI_", "PMIX_", "PRTE_"))}  # fmt: skip
    driver = [pretend_driver()] if pretend else []
    libraries = [*driver, f"{PREFIX}/lib", *filter(None, [kept.get("LD_LIBRARY_PATH")])]
    return {
        **kept, "OPAL_PREFIX": PREFIX, "PATH": f"{PREFIX}/bin:{kept['PATH']}", "LD_LIBRARY_PATH": ":".join(libraries),
        "MPI4PY_LIBMPI": f"{PREFIX}/lib/libmpi.so.40", "MPI4PY_MPIABI": "openmpi", "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": ":".join(map(str, [ROOT, *([PRETEND] if pretend else []), kept.get("PYTHONPATH", "")])), "PYTHONUNBUFFERED": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3", "TF_FORCE_GPU_ALLOW_GROWTH": "true",  # ranks share a GPU
        **({"PRETEND_CUDA_DRIVER": "1"} if pretend else {}), **extra,
    }  # fmt: skip


def run_checks(size: int, checks: Sequence[str], pretend: bool, extra: Mapping[str, str] | None = None) -> Result:
    """Run checks as a job of `size` ranks. Checks of tests/gpu/ranks have the name gpu/MODULE."""
    return run(size, ["-m", "tests.parallel.runner", *checks], pretend, extra)


def run(size: int, arguments: Sequence[str], pretend: bool, extra: Mapping[str, str] | None = None) -> Result:
    """Run `python ARGUMENTS` as a job of `size` ranks."""
    command = [f"{PREFIX}/bin/mpirun", "-np", str(size), sys.executable, *arguments]
    return finished(command, environment(pretend, extra or {}), SECONDS)
