"""`python -m tests.gpu [checks|benchmarks]` on a machine with a GPU: all checks, the benchmarks, one table.

run_on_gpu.sh prepares a bare machine for it. Ends with 1 where a check failed or a benchmark did not end well; a check
that fails ends its job, and another job runs the rest, a few times.
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu import jobs
from tests.parallel.jobs import ROOT, explain

MOST_JOBS = 6
SECONDS, SECONDS_OF_A_JOB = 450, 120  # for all, and for one, less when time runs out
TORCH = {"TORCH_TENSORS_ON": "cuda"}
BENCH = ["-m", "hvdlite.bench", "allreduce", "--device", "cuda"]
STEPS = ["-m", "hvdlite.bench", "step", "--device", "cuda", "--steps", "15"]
LONG = ["--min", "256M", "--max", "1G", "--iters", "7", "--algorithms", "ipc,ring,ring_whole,staged,mpi_host,copy"]


@dataclass(frozen=True)
class Row:
    """A job of `size` ranks: checks, or a program's arguments."""

    name: str
    size: int
    checks: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)


TENSORFLOW = (  # where it is installed; no Keras steps, which would be compiled with XLA on a GPU
    Row("TensorFlow: placement, races", 2, ("gpu/tensorflow_gpu",)),
    Row("TensorFlow checks of tests/parallel", 2, ("tensorflow_collectives",)),
) if importlib.util.find_spec("tensorflow") else ()
KERAS = (
    Row("Keras on torch", 2, ("backends_keras",), extra={"KERAS_BACKEND": "torch"}),
) if importlib.util.find_spec("keras") else ()
TORCH_CHECKS = ("torch_gradients", "torch_steps", "torch_backwards", "torch_collectives", "torch_dtypes")
CHECKS = (
    Row("is the MPI CUDA-aware", 2, program=("-m", "hvdlite.transports.cuda_aware")),
    Row("CuPy arrays", 2, ("gpu/device_arrays",)),
    Row("races, AMP, layouts, placement", 2, ("gpu/torch_cuda",)),
    Row("torch checks of tests/parallel", 2, TORCH_CHECKS, extra=TORCH),
    Row("CuPy arrays", 4, ("gpu/device_arrays",)),
    Row("gradients", 4, ("gpu/torch_cuda.check_gradients_every_way", "gpu/torch_cuda.check_low_precision")),
    *TENSORFLOW, *KERAS,
)
BENCHMARKS = (
    Row("training steps", 2, program=(*STEPS, "--json", "bench-gpu-steps.json")),
    Row("all-reduce", 2, program=(*BENCH, "--max", "64M", "--seconds", "0.5", "--json", "bench-gpu.json")),
    Row("all-reduce, long", 2, program=(*BENCH, *LONG, "--json", "bench-gpu-long.json")),
)


def expanded(name: str) -> list[str]:
    """A module's checks, one by one; a single check as it is."""
    folder, _, rest = name.rpartition("/")
    if "." in rest:
        return [name]
    tree = ast.parse((ROOT / "tests" / (folder or "parallel") / "ranks" / f"{rest}.py").read_text())
    functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f"{name}.{function}" for function in functions if function.startswith("check_")]


def failures(row: Row) -> list[str]:
    """Run a row's checks; those that failed, and why."""
    rest = [check for name in row.checks for check in expanded(name)]
    found = []
    for _ in range(MOST_JOBS):
        result = jobs.run_checks(row.size, rest, False, row.extra)
        passed = result.passed()
        failed = next((check for check in rest if check.rpartition("/")[2] not in passed), None)
        if failed is None:
            return [*found, *([] if result.ended_well() else [explain(result, "shutdown")])]
        found.append(explain(result, failed))
        rest = rest[rest.index(failed) + 1 :]
        if not rest:
            return found
    return [*found, f"not run: {', '.join(rest)}"]


def program_failures(row: Row) -> list[str]:
    result = jobs.run(row.size, row.program, False, row.extra)
    print(result.output if "bench" in " ".join(row.program) else "", flush=True)
    return [] if result.code == 0 else [explain(result, row.name)]


def machine() -> str:
    """The GPU and what drives it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no GPU that nvidia-smi tells of ({error})"


def main(arguments: Sequence[str]) -> int:
    parts = {"checks": CHECKS, "benchmarks": BENCHMARKS}
    lines, failed, start = [], False, time.monotonic()
    lines += [f"{name} is not installed: NOT RUN" for name, rows in (("TensorFlow", TENSORFLOW), ("Keras", KERAS)) if not rows]
    for row in parts[arguments[0]] if arguments else (*CHECKS, *BENCHMARKS):
        began = time.monotonic()
        jobs.SECONDS = max(min(SECONDS_OF_A_JOB, int(start + SECONDS - began)), 10)
        found = failures(row) if row.checks else program_failures(row)
        failed |= bool(found)
        print("\n".join(found), flush=True)
        seconds = time.monotonic() - began
        lines.append(f"{row.name + f', {row.size} ranks':45} {seconds:5.0f} s  {'FAILED' if found else 'ok'}")
        lines += [f"    {text.partition(':')[0]}" for text in found]
        print(lines[-1 - len(found)], flush=True)
    print("\n".join(("", machine(), time.strftime("%Y-%m-%d"), *lines)))
    return int(failed)


if __name__ == "__main__":
    assert Path.cwd() == ROOT, f"run it in {ROOT}"
    sys.exit(main(sys.argv[1:]))
