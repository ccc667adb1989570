"""Runs `hvdliterun` and plain mpirun as child processes, with each MPI in the folder of the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hvdlite_launcher import UsageError
from hvdlite_launcher.probe import Family, Mpi, find_mpi
from hvdlite_launcher.processes import marked

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]
LIMIT = 20.0  # seconds for one job; each takes about one


def available() -> list[Mpi]:
    """One MPI of each family, or the one whose launcher HVDLITE_TEST_MPI names. Two wheels may share an environment; the
    last one installed owns `mpirun`."""
    found: dict[Family, Mpi] = {}
    chosen = os.environ.get("HVDLITE_TEST_MPI")
    for name in (chosen,) if chosen else ("mpirun", "mpiexec.hydra", "prterun", ""):
        path = Path(sys.executable).parent / name
        try:
            mpi = find_mpi(os.environ, str(path) if name else None)
        except UsageError:
            continue
        found.setdefault(mpi.family, mpi)
    return list(found.values())


@dataclass
class Runner:
    """Starts jobs whose processes have a mark of their own in the environment, by which leftovers are found.

    prefix: a command before hvdliterun's, which runs it on another host.
    """

    mpi: Mpi
    tmpdir: Path
    prefix: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: f"HVDLITE_TEST={uuid.uuid4().hex}")

    @property
    def library(self) -> str:
        """How the library's own description begins."""
        return "Intel(R) MPI" if self.mpi.family is Family.INTEL_MPI else self.mpi.family.value

    @property
    def has_segments(self) -> bool:
        """Whether the MPI's shared memory has names in /dev/shm while a job runs. Intel MPI removes them at once, and
        Debian's MPICH uses UCX."""
        debians = self.mpi.library is None and self.mpi.family is Family.MPICH
        return self.mpi.family is not Family.INTEL_MPI and not debians

    def env(self, **more: str) -> dict[str, str]:
        name, value = self.mark.split("=")
        path = os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"]))
        own = {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'launcher'}",
            "HVDLITE_MPIEXEC": self.mpi.launcher,
            "TMPDIR": str(self.tmpdir),
        }
        outer = {key: text for key, text in os.environ.items() if not key.startswith("HVDLITE_TEST_")}  # no settings
        return {**outer, "PATH": path, name: value, **own, **more}

    def start(self, *arguments: str, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        """hvdliterun with these arguments, running."""
        heard = ("env", "--default-signal=HUP")  # which hvdliterun would ignore if the tests run under nohup
        return subprocess.Popen(
            [*heard, *self.prefix, sys.executable, "-m", "hvdlite_launcher.cli", *arguments],
            env=self.env(),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-Z does nothing in a group whose parents are all gone, as pytest's may be
        )

    def run(self, *arguments: str, text: str | None = None, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
        """hvdliterun with these arguments, and this text on stdin, to its end."""
        process = self.start(*arguments, stdin=subprocess.DEVNULL if text is None else subprocess.PIPE)
        try:
            out, err = process.communicate(text, timeout=limit)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def plain(self, ranks: int, *command: str) -> subprocess.CompletedProcess[str]:
        """Run the MPI's own launcher, without hvdliterun."""
        argv, env = self.plain_command(ranks, *command)
        null = subprocess.DEVNULL
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=LIMIT, stdin=null)

    def plain_command(self, ranks: int, *command: str) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment for the MPI's own launcher."""
        argv, env = [self.mpi.launcher, "-n", str(ranks)], self.env(MPI4PY_LIBMPI=self.mpi.library or "")
        if self.mpi.family is Family.OPEN_MPI:
            argv += ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
            env |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": f"self,{'sm' if self.mpi.version >= (5,) else 'vader'},tcp"}
            env |= {"PRTE_MCA_schizo_proxy": "ompi", "PRTE_PREFIX": str(Path(self.mpi.launcher).parents[1])}
        return [*argv, *command], env

    def leftovers(self) -> list[int]:
        """Processes of this runner's jobs that still exist."""
        return list(marked(self.mark.encode()))

    def wait_gone(self, seconds: float = 3.0) -> bool:
        """Whether all processes are gone within that time."""
        return wait_until(lambda: not self.leftovers(), seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "runner" in metafunc.fixturenames:
        mpis = available()
        reason = "no MPI beside the interpreter or on PATH"
        params = [pytest.param(mpi, id=mpi.family.name.lower()) for mpi in mpis]
        params = params or [pytest.param(None, marks=pytest.mark.skip(reason))]
        metafunc.parametrize("runner", params, indirect=True)


@pytest.fixture
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Runner]:
    runner = Runner(request.param, tmp_path)
    yield runner
    for pid in runner.leftovers():
        os.kill(pid, 9)
