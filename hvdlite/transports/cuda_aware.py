"""A trial that finds out whether the MPI is CUDA-aware, in two separate processes, which may crash.

An MPI that is not CUDA-aware crashes when it gets a device pointer, and what MPIs report about themselves is not
reliable. So a job of two processes sends arrays from GPU to GPU and checks the result. The launcher of the loaded MPI
library starts that job. The user's cache folder keeps the answer for each MPI library, driver and MPI settings. If
there is no launcher, the answer is no, which is always correct, but slower.

The first GPU request of a lane asks for the answer, on one rank per host, unless HVDLITE_CUDA_AWARE is set.
`hvdlite.check` asks, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from hvdlite import config
from hvdlite.arrays import cupy
from hvdlite.system.launcher_environment import fresh_environment, mpi_settings

SECONDS = 90  # for the trial; a network's driver may take long to start
PACKAGES = Path(__file__).resolve().parents[2]
log = logging.getLogger("hvdlite")


def cuda_aware(library: str) -> bool:
    """Whether the loaded MPI takes device pointers. The first call takes seconds. library: the MPI's version text."""
    return answer(library, loaded_library(), str(cupy().cuda.runtime.driverGetVersion()), *mpi_settings())


@cache
def answer(*facts: str) -> bool:
    """The answer for these facts, from the cache or from a trial. The first fact is the library's version."""
    known = config.cache_folder() / f"cuda-aware-{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}.json"
    try:
        return bool(json.loads(known.read_text())["cuda_aware"])
    except (OSError, ValueError, KeyError, TypeError):
        found = trial(facts[0])
    if found is not None:
        write(known, {"cuda_aware": found, "facts": facts})
    return bool(found)


def trial(library: str) -> bool | None:
    """Run the trial and return its result. None if it has no result: no launcher, no GPU memory, or a timeout."""
    launcher = launcher_of(loaded_library())
    if launcher is None:
        log.warning(
            "there is no mpirun beside the MPI library or on PATH, so hvdlite cannot find out whether the MPI "
            "is CUDA-aware: messages pass through host memory. HVDLITE_CUDA_AWARE=1 if it is [HVD113]"
        )
        return None
    options = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in library else []
    job = subprocess.Popen(
        [launcher, *options, "-np", "2", sys.executable, "-P", "-m", "hvdlite.cuda_trial"],
        env=fresh_environment(str(PACKAGES)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = job.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        output, _ = job.communicate()
        log.warning("the trial of %s with GPU memory did not end within %d seconds", library, SECONDS)
        return None
    log.debug("trial of %s with GPU memory: code %s\n%s", library, job.returncode, output)
    if output.count(STARTED) < 2:
        log.warning("the trial of %s with GPU memory could not begin (is the GPU full?):\n%s", library, output)
        return None
    return job.returncode == 0 and output.count(PASSED) == 2


def loaded_library() -> str:
    """The path of the MPI library that this process has loaded; "" if it is unknown."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next((path for path in (line.split(maxsplit=5)[-1] for line in lines) if is_mpi(path)), "")


def is_mpi(path: str) -> bool:
    """Whether a file in /proc/self/maps is an MPI library."""
    name = Path(path).name
    return path.startswith("/") and name.startswith(("libmpi.so", "libmpich.so", "libmpi_cuda"))


def launcher_of(library: str) -> str | None:
    """The path of mpirun or mpiexec: of the library's installation, else from PATH; None if there is none."""
    folders = [str(folder / "bin") for folder in Path(library).parents] if library else []
    for folder in (*folders, None):
        for name in ("mpirun", "mpiexec"):
            if found := shutil.which(name, path=folder):
                return found
    return None


def write(file: Path, content: object) -> None:
    """Write the file at once. If it cannot be written, the next job runs the trial again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(content))
        draft.replace(file)
    except OSError as error:
        log.debug("cannot keep the answer in %s: %s", file, error)


STARTED, PASSED = "device memory is there", "device memory arrived"
