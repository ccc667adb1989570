"""Tells what is installed here and what of it hvdlite will use: `python -m hvdlite.check`, or `hvdliterun --check`.

Everything that may crash or hang (loading an MPI, giving it GPU memory) happens in a child with a time limit.
Frameworks are looked up, not imported: what takes ten seconds is not asked for twice.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import hvdlite

FRAMEWORKS = {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras", "JAX (with Keras)": "jax"}
LIBRARIES = ("numpy", "mpi4py", "ml_dtypes", "cloudpickle", "rich", "pyyaml")
SCHEDULERS = {"Slurm": "srun", "LSF": "jsrun", "LSF (blaunch)": "blaunch", "PBS": "qsub", "Flux": "flux"}
ROOM = 1 << 30  # bytes of shared memory below which gradients of a large model may not fit
SECONDS = 120
_MPI = """
import json, sys
import mpi4py
from hvdlite import launched
mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
from mpi4py import MPI
from hvdlite.transports import mpi
said = {"library": mpi.library()}
print(json.dumps(said), flush=True)
with launched.alone():
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
said["threads"] = MPI.Query_thread() == MPI.THREAD_MULTIPLE
print(json.dumps(said), flush=True)
if "cuda" in sys.argv:
    from hvdlite.transports.cuda_aware import cuda_aware, loaded_library
    said["file"], said["cuda"] = loaded_library(), cuda_aware(said["library"])
print(json.dumps(said), flush=True)
MPI.Finalize()
"""


@dataclass(frozen=True)
class Line:
    """One finding. good: whether it is there, as [X] or [ ]."""

    good: bool
    text: str

    def __str__(self) -> str:
        return f"    [{'X' if self.good else ' '}] {self.text}"


def main() -> None:
    """Print the report. Always ends well: what is missing is told, and may not be needed."""
    print(f"hvdlite {hvdlite.__version__} ({Path(hvdlite.__file__).parent})")
    print(f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    for title, lines in (
        ("Frameworks", frameworks()),
        ("MPI", mpi()),
        ("GPUs", gpus()),
        ("This host", host()),
        ("Schedulers", schedulers()),
        ("Libraries", libraries()),
    ):
        print(f"\n{title}:")
        for line in lines:
            print(line, flush=True)


def frameworks() -> Iterator[Line]:
    """Frameworks with an adapter."""
    for name, module in FRAMEWORKS.items():
        version = installed(module)
        yield Line(version is not None, f"{name} {version or ''}".rstrip())


def mpi() -> Iterator[Line]:
    """The launcher that hvdliterun takes, the library that mpi4py loads, and what it can do."""
    from hvdlite_launcher.probe import find_mpi
    from hvdlite_launcher.usage import UsageError

    env = dict(os.environ)
    try:
        found = find_mpi(os.environ, os.environ.get("HVDLITE_MPIEXEC"))
        yield Line(True, f"launcher: {found}")
        env |= {"MPI4PY_LIBMPI": found.library} if found.library and "MPI4PY_LIBMPI" not in env else {}
    except UsageError as error:
        yield Line(False, f"launcher: {error}")
    cuda = ["cuda"] if installed("cupy") and gpu_names() else []
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Open MPI 5 leaves a session's
            said, trouble = ask(["-c", _MPI, *cuda], env | {"TMPDIR": folder})
    except OSError as error:
        yield Line(False, f"temporary files: {error.strerror or error}: free some room, or set TMPDIR")
        said, trouble = ask(["-c", _MPI, *cuda], env)
    if "library" not in said:
        yield Line(False, f"library: {trouble}; install an MPI and mpi4py, or point MPI4PY_LIBMPI to libmpi.so")
        return
    yield Line(True, f"library: {said['library']}" + (f" ({env['MPI4PY_LIBMPI']})" if "MPI4PY_LIBMPI" in env else ""))
    if "threads" not in said:
        yield Line(False, f"MPI cannot be initialized: {trouble}")
        return
    yield Line(bool(said["threads"]), "MPI_THREAD_MULTIPLE" + ("" if said["threads"] else ": hvdlite needs it"))
    yield cuda_line(said, trouble)


def cuda_line(said: dict[str, object], trouble: str) -> Line:
    """Whether the MPI may be given GPU memory, and how that is known."""
    chosen = os.environ.get("HVDLITE_CUDA_AWARE")
    if chosen:
        return Line(chosen == "1", f"CUDA-aware: HVDLITE_CUDA_AWARE={chosen} decides")
    if not gpu_names():
        return Line(False, "CUDA-aware: no GPU here to try it with")
    if not installed("cupy"):
        return Line(False, "CUDA-aware: CuPy is needed to try it (pip install 'hvdlite[cuda12]')")
    if "cuda" not in said:
        return Line(False, f"CUDA-aware: the trial failed: {trouble}")
    how = "two processes exchanged GPU memory" if said["cuda"] else "GPU memory did not arrive, so the host's is used"
    return Line(bool(said["cuda"]), f"CUDA-aware: {'yes' if said['cuda'] else 'no'}, tried: {how}")


def gpus() -> Iterator[Line]:
    """GPUs by the driver's own tool, and CuPy."""
    names = gpu_names()
    for name in names:
        yield Line(True, name)
    if not names:
        yield Line(False, "none (nvidia-smi finds none)")
    version = next(filter(None, map(installed, ("cupy", "cupy-cuda12x", "cupy-cuda13x"))), None)
    yield Line(version is not None, f"CuPy {version}" if version else "CuPy, which tensors on GPUs need")


def host() -> Iterator[Line]:
    """Cores, shared memory, ssh."""
    yield Line(True, f"{len(os.sched_getaffinity(0))} cores for this process, of {os.cpu_count()}")
    try:
        room = shutil.disk_usage("/dev/shm").free
        advice = "" if room >= ROOM else ": little for the MPI and for DataLoaders; in Docker say --shm-size=8g"
        yield Line(room >= ROOM, f"shared memory: {room / 2**30:.1f} GiB free in /dev/shm{advice}")
    except OSError as error:
        yield Line(False, f"shared memory: /dev/shm: {error.strerror}; the MPI and DataLoaders need it")
    ssh = shutil.which("ssh")
    yield Line(ssh is not None, f"ssh: {ssh}" if ssh else "ssh, which other hosts are reached by")


def schedulers() -> Iterator[Line]:
    """Schedulers' programs, and whether this is inside a job of theirs."""
    from hvdlite_launcher.schedulers import allocation
    from hvdlite_launcher.usage import UsageError

    for name, program in SCHEDULERS.items():
        path = shutil.which(program)
        yield Line(path is not None, f"{name}: {path}" if path else name)
    try:
        given = allocation(os.environ)
    except UsageError as error:
        yield Line(False, str(error))
        return
    if given:
        hosts = ",".join(f"{each.name}:{each.slots}" for each in given.hosts) or "known to the scheduler only"
        yield Line(True, f"inside a job of {given.name}: {hosts}")


def libraries() -> Iterator[Line]:
    """What hvdlite depends on."""
    for name in LIBRARIES:
        version = installed(name)
        yield Line(version is not None, f"{name} {version or 'is missing'}")


def installed(module: str) -> str | None:
    """The version of an installed module or distribution; None where there is none."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec(module.replace("-", "_")) is None:
        return None
    owners = metadata.packages_distributions().get(module, [])
    return metadata.version(owners[0]) if owners else "of unknown version"


def gpu_names() -> list[str]:
    """What `nvidia-smi -L` lists."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.startswith("GPU ")]


def ask(arguments: list[str], env: dict[str, str]) -> tuple[dict[str, object], str]:
    """The last facts that a Python child has printed, and its last words on stderr."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    argv = [sys.executable, "-P", *arguments]
    child = subprocess.Popen(argv, env=env, stdin=null, stdout=pipe, stderr=pipe, text=True)
    try:
        out, err = child.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        err += f"no answer within {SECONDS} s"
    facts = [line for line in out.splitlines() if line.startswith("{")]
    words = [line for line in err.splitlines() if line.strip()] or [f"it ended with code {child.returncode}"]
    return (json.loads(facts[-1]) if facts else {}), words[-1]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as of any command whose output is read by `head`
    main()
