"""`python -m hvdlite.check`, or `hvdliterun --check`: reports what is installed here, and what of it hvdlite will use.

The last line is a verdict in one sentence. The exit code is 1 if nothing can train on this host. Everything that may
crash or hang (loading MPI, giving it GPU memory) runs in a child process with a time limit. Frameworks are looked up
and not imported, because an import may take ten seconds.

`--json` prints one JSON object in one line instead. Its fields are the same for one host and for several hosts
(`hvdlite_launcher.checks`):

    ready        whether training can start
    verdict      the sentence
    ready_for    a list of what can train: "torch on CPU", "keras on GPUs", ...
    not_ready    a list of what cannot train, with reasons
    hosts        a list of {host, own_name, ready, problem, hvdlite, python, mpi}; problem: why the host cannot be part
                 of a job on several hosts, or null
    findings     a list of {host, section, name, state, text, version}; state: ok, warning (works, but may fail later),
                 absent or broken (and needed), optional (absent, and not needed), not tried
"""

from __future__ import annotations

import argparse
import enum
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import hvdlite

FRAMEWORKS = {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras", "JAX (with Keras)": "jax"}
LIBRARIES = ("numpy", "mpi4py", "ml_dtypes", "cloudpickle", "rich", "pyyaml")
SCHEDULERS = {"Slurm": "srun", "LSF": "jsrun", "LSF (blaunch)": "blaunch", "PBS": "qsub", "Flux": "flux"}
ROOM = 1 << 30  # bytes of shared memory; with less, gradients of a large model may not fit
SECONDS = 120  # for each child process
_MPI = """
import json, sys
import mpi4py
from hvdlite.system import launcher_environment
mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
from mpi4py import MPI
from hvdlite.transports import mpi
said = {"library": mpi.library(), "gtl": "libmpi_gtl" in open("/proc/self/maps").read()}
print(json.dumps(said), flush=True)
with launcher_environment.alone():
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
said["threads"] = MPI.Query_thread() == MPI.THREAD_MULTIPLE
print(json.dumps(said), flush=True)
if "cuda" in sys.argv:
    from hvdlite.transports.cuda_aware import cuda_aware, loaded_library
    said["file"], said["cuda"] = loaded_library(), cuda_aware(said["library"])
print(json.dumps(said), flush=True)
MPI.Finalize()
"""


class State(enum.Enum):
    """The state of one finding. hvdlite needs what is ABSENT or BROKEN. A WARNING works, but may fail later."""

    OK = "ok"
    WARNING = "warning"
    ABSENT = "absent"
    BROKEN = "broken"
    OPTIONAL = "optional"
    NOT_TRIED = "not tried"


MARKS = {State.OK: "X", State.WARNING: "!", State.NOT_TRIED: "?"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        section: The heading above the line.
        name: The same on every host.
        state: Whether it works.
        text: For people.
        version: The version, if there is one.
    """

    section: str
    name: str
    state: State
    text: str
    version: str | None = None

    def __str__(self) -> str:
        state = "" if self.state is State.OK else f"{self.state.value}: "
        return f"    [{MARKS.get(self.state, ' ')}] {state}{self.text}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m hvdlite.check", description="what is installed, and will be used")
    parser.add_argument("--json", action="store_true", help="print one JSON object in one line")
    parser.add_argument("--host", default="", metavar="NAME", help="this host's name among several")
    parser.add_argument("--folder", metavar="PATH", help="must be here, since the ranks will start in it")
    options = parser.parse_args(arguments)
    if not options.json:
        print(f"hvdlite {hvdlite.__version__} ({Path(hvdlite.__file__).parent})")
        print(f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}")
    found: list[Finding] = []
    for finding in findings(options.folder, alone=not options.host):
        if not options.json:
            title = "" if found and found[-1].section == finding.section else f"\n{finding.section}:\n"
            print(f"{title}{finding}", flush=True)
        found.append(finding)
    said = report(found, options.host or socket.gethostname())
    print(json.dumps(said) if options.json else f"\n{said['verdict']}")
    return 0 if said["ready"] else 1


def findings(folder: str | None, alone: bool) -> Iterator[Finding]:
    """Find everything on this host.

    Args:
        folder: As for `host`.
        alone: As for `host`.
    """
    yield from frameworks()
    yield from mpi()
    yield from gpus()
    yield from host(folder, alone)
    yield from schedulers()
    yield from libraries()


def report(found: Sequence[Finding], name: str) -> dict[str, object]:
    """Return the object that `--json` prints. `name` is this host's name."""
    from hvdlite_launcher.readiness import verdict

    good, bad = readiness(found)
    library = next((each.version for each in found if each.name == "library"), None)
    warnings = [each.name for each in found if each.state is State.WARNING]
    own = socket.gethostname()
    versions = {"hvdlite": hvdlite.__version__, "python": platform.python_version(), "mpi": library}
    return {
        "ready": bool(good),
        "verdict": verdict(good, bad, warnings, hosts=1),
        "ready_for": good,
        "not_ready": bad,
        "hosts": [{"host": name, "ready": bool(good), "problem": None, "own_name": own, **versions}],
        "findings": [{"host": name, **asdict(each), "state": each.state.value} for each in found],
    }


def readiness(found: Sequence[Finding]) -> tuple[list[str], list[str]]:
    """Return what can train on this host, and what cannot, with reasons."""
    needed = ("MPI", "Libraries", "This host")
    missing = [each for each in found if each.section in needed and each.state in (State.ABSENT, State.BROKEN)]
    there = {each.name for each in found if each.section == "Frameworks" and each.state is State.OK}
    names = [module for name, module in FRAMEWORKS.items() if name in there and module != "jax"]
    bad = [each.text + (" (absent)" if each.section == "Libraries" else "") for each in missing]
    if "keras" in names and not there & {"PyTorch", "TensorFlow", "JAX (with Keras)"}:
        names.remove("keras")
        bad.append("keras (it needs TensorFlow, PyTorch or JAX)")
    names = names or ["NumPy arrays"]
    good = [f"{name} on CPU" for name in names]
    for name in names if any(each.name == "GPU" and each.state is State.OK for each in found) else ():
        if why := _no_gpu(name, found):
            bad.append(f"{name} on GPUs ({why})")
        else:
            good.append(f"{name} on GPUs")
    if any(each.name == "ssh" and each.state is not State.OK for each in found):
        bad.append("several hosts (no ssh here)")
    return ([] if missing else good), bad


def _no_gpu(name: str, found: Sequence[Finding]) -> str | None:
    """Return why a framework cannot use this host's GPUs; None if it can."""
    if not any(each.name == "CuPy" and each.state is State.OK for each in found):
        return "CuPy is absent: pip install 'hvdlite[cuda12]' or [cuda13]"
    if name == "torch" and "+cpu" in (installed("torch") or ""):
        return "this PyTorch was built for CPUs"
    return None


def frameworks() -> Iterator[Finding]:
    """Find the frameworks that have an adapter."""
    for name, module in FRAMEWORKS.items():
        version = installed(module)
        state = State.OK if version else State.OPTIONAL
        yield Finding("Frameworks", name, state, f"{name} {version}" if version else f"{name}: not installed", version)


def mpi() -> Iterator[Finding]:
    """Find the launcher that hvdliterun uses and the library that mpi4py loads, and try what that library can do."""
    from hvdlite_launcher import UsageError
    from hvdlite_launcher.probe import Mpi, find_mpi

    env, found = dict(os.environ), None
    try:
        found = find_mpi(os.environ, os.environ.get("HVDLITE_MPIEXEC"))
        yield Finding("MPI", "launcher", State.OK, f"launcher: {found}", ".".join(map(str, found.version)))
        env |= {"MPI4PY_LIBMPI": found.library} if found.library and "MPI4PY_LIBMPI" not in env else {}
    except UsageError as error:
        starter = next(filter(shutil.which, ("srun", "jsrun", "flux")), None)
        state, cure = (State.OPTIONAL, f" (or start ranks with {starter})") if starter else (State.ABSENT, "")
        yield Finding("MPI", "launcher", state, f"launcher: {error}{cure}")
    cuda = ["cuda"] if installed("cupy") and gpu_names() else []
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # Open MPI 5 leaves a session's
            said, trouble = ask(["-c", _MPI, *cuda], env | {"TMPDIR": folder})
    except OSError as error:
        problem = f"temporary files: {error.strerror or error}: free some room, or set TMPDIR"
        yield Finding("MPI", "temporary files", State.BROKEN, problem)
        said, trouble = ask(["-c", _MPI, *cuda], env)
    yield library(said, trouble, env.get("MPI4PY_LIBMPI"))
    if isinstance(found, Mpi) and "library" in said:
        yield from mixed(found.family.value, str(said["library"]))
    yield from gpu_transport(said, env)
    yield threads(said, trouble)
    yield cuda_aware(said, trouble)


def library(said: Mapping[str, object], trouble: str, path: str | None) -> Finding:
    """Report whether mpi4py loads an MPI. `path` is the library that mpi4py was told to load, or None."""
    if "library" not in said:
        cure = "install an MPI and mpi4py, or point MPI4PY_LIBMPI to libmpi.so"
        return Finding("MPI", "library", State.BROKEN, f"library: {trouble}; {cure} [HVD101]")
    text = f"library: {said['library']}" + (f" ({path})" if path else "")
    return Finding("MPI", "library", State.OK, text, str(said["library"]))


def mixed(family: str, library: str) -> Iterator[Finding]:
    """Warn if the launcher's MPI (`family`) and the library's MPI cannot work together."""
    if (family == "Open MPI") != library.startswith("Open MPI"):
        text = f"the launcher is {family}'s, but mpi4py loads {library}: ranks would not find each other"
        cure = "load one MPI's module, or set HVDLITE_MPIEXEC or MPI4PY_LIBMPI"
        yield Finding("MPI", "two MPIs", State.WARNING, f"{text}; {cure} [HVD102]")


def gpu_transport(said: Mapping[str, object], env: Mapping[str, str]) -> Iterator[Finding]:
    """Warn if Cray's MPICH is asked for GPU memory without its library for GPUs. MPICH then ends each process.

    Compiled programs are linked to that library, but mpi4py is not.
    """
    asked = env.get("MPICH_GPU_SUPPORT_ENABLED") == "1"
    if asked and "CRAY" in str(said.get("library", "")).upper() and not said.get("gtl"):
        preload = "$CRAY_MPICH_ROOTDIR/gtl/lib/libmpi_gtl_cuda.so"
        text = "MPICH_GPU_SUPPORT_ENABLED=1, but libmpi_gtl_cuda is not loaded, and MPI cannot start without it"
        cure = f"set LD_PRELOAD={preload} (and give it to the ranks with -x LD_PRELOAD), or MPICH_GPU_SUPPORT_ENABLED=0"
        yield Finding("MPI", "GPU transport", State.WARNING, f"{text}: {cure}")


def threads(said: Mapping[str, object], trouble: str) -> Finding:
    """Report whether MPI can be initialized for several threads."""
    name = "MPI_THREAD_MULTIPLE"
    if "library" not in said:
        return Finding("MPI", name, State.NOT_TRIED, f"{name}: no MPI could be loaded")
    if "threads" not in said:
        return Finding("MPI", name, State.BROKEN, f"{name}: MPI cannot be initialized: {trouble}")
    if not said["threads"]:
        text = f"{name}: this MPI was built without it, and hvdlite needs it: load another MPI [HVD103]"
        return Finding("MPI", name, State.BROKEN, text)
    return Finding("MPI", name, State.OK, name)


def cuda_aware(said: Mapping[str, object], trouble: str) -> Finding:
    """Report whether MPI can send GPU memory, and how that is known."""
    state, text = _cuda_aware(said, trouble)
    return Finding("MPI", "CUDA-aware", state, f"CUDA-aware: {text}")


def _cuda_aware(said: Mapping[str, object], trouble: str) -> tuple[State, str]:
    """Return the state and the text of `cuda_aware`."""
    chosen = os.environ.get("HVDLITE_CUDA_AWARE")
    if chosen:
        return State.OK if chosen == "1" else State.OPTIONAL, f"HVDLITE_CUDA_AWARE={chosen} decides"
    if not gpu_names():
        return State.NOT_TRIED, "no GPU here to try it with"
    if not installed("cupy"):
        return State.NOT_TRIED, "CuPy is needed to try it (pip install 'hvdlite[cuda12]')"
    if "threads" not in said:
        return State.NOT_TRIED, "MPI cannot be initialized"
    if "cuda" not in said:
        return State.WARNING, f"the trial failed, so the host's memory is used: {trouble}"
    if said["cuda"]:
        return State.OK, "yes, tried: two processes exchanged GPU memory"
    return State.OPTIONAL, "no, tried: GPU memory did not arrive, so the host's is used"


def gpus() -> Iterator[Finding]:
    """Find GPUs, with the driver's own tool, and CuPy."""
    names = gpu_names()
    for name in names:
        yield Finding("GPUs", "GPU", State.OK, name)
    if not names:
        yield Finding("GPUs", "GPU", State.OPTIONAL, "GPUs: none here (nvidia-smi finds none)")
    version = next(filter(None, map(installed, ("cupy", "cupy-cuda12x", "cupy-cuda13x"))), None)
    if version:
        yield Finding("GPUs", "CuPy", State.OK, f"CuPy {version}", version)
    else:
        state = State.ABSENT if names else State.OPTIONAL
        yield Finding("GPUs", "CuPy", state, "CuPy: not installed; tensors on GPUs need it")


def host(folder: str | None, alone: bool) -> Iterator[Finding]:
    """Find cores, shared memory and ssh.

    Args:
        folder: The folder in which ranks will start, or None. It must exist here.
        alone: Whether this is the only host that is checked.
    """
    section = "This host"
    cores = f"{len(os.sched_getaffinity(0))} cores for this process, of {os.cpu_count()}"
    yield Finding(section, "cores", State.OK, cores)
    yield shared_memory()
    ssh = shutil.which("ssh")
    reach = f"ssh: {ssh}" if ssh else "ssh: none here; other hosts are reached by it"
    yield Finding(section, "ssh", State.OK if ssh else State.OPTIONAL, reach)
    if folder and not os.path.isdir(folder):
        yield Finding(section, "folder", State.ABSENT, f"folder: {folder} is not here, and ranks would start in it")
    if alone:
        yield Finding(section, "other hosts", State.NOT_TRIED, "other hosts: name them, --check -H hosta:1,hostb:1")


def shared_memory() -> Finding:
    """Report the free space in /dev/shm."""
    try:
        room = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        text = f"shared memory: /dev/shm: {error.strerror}; the MPI and DataLoaders need it"
        return Finding("This host", "shared memory", State.WARNING, text)
    few = "" if room >= ROOM else ": little for gradients, the MPI and DataLoaders; in Docker say --shm-size=8g"
    state = State.WARNING if few else State.OK
    return Finding("This host", "shared memory", state, f"shared memory: {room / 2**30:.1f} GiB free in /dev/shm{few}")


def schedulers() -> Iterator[Finding]:
    """Find schedulers' programs, and the scheduler's job that this process belongs to."""
    from hvdlite_launcher import UsageError
    from hvdlite_launcher.schedulers import allocation

    section = "Schedulers"
    for name, program in SCHEDULERS.items():
        path = shutil.which(program)
        state = State.OK if path else State.OPTIONAL
        yield Finding(section, name, state, f"{name}: {path or 'none here'}")
    try:
        given = allocation(os.environ)
    except UsageError as error:
        yield Finding(section, "job", State.WARNING, str(error))
        return
    if given:
        hosts = ",".join(f"{each.name}:{each.slots}" for each in given.hosts) or "known to the scheduler only"
        yield Finding(section, "job", State.OK, f"inside a job of {given.name}: {hosts}")


def libraries() -> Iterator[Finding]:
    """Find the packages that hvdlite depends on."""
    for name in LIBRARIES:
        version = installed(name)
        state = State.OK if version else State.ABSENT
        yield Finding("Libraries", name, state, f"{name} {version or ''}".rstrip(), version)


def installed(module: str) -> str | None:
    """Return the version of a module or distribution; None if it is not installed."""
    try:
        return metadata.version(module)
    except metadata.PackageNotFoundError:
        pass
    if importlib.util.find_spec(module.replace("-", "_")) is None:
        return None
    owners = metadata.packages_distributions().get(module, [])
    return metadata.version(owners[0]) if owners else "of unknown version"


def gpu_names() -> list[str]:
    """Return the lines of `nvidia-smi -L`, one per GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.startswith("GPU ")]


def ask(arguments: list[str], env: dict[str, str]) -> tuple[dict[str, object], str]:
    """Run Python with these arguments. Returns the last JSON object that it printed, and its last line on stderr."""
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
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `... | head` ends quietly
    sys.exit(main())
