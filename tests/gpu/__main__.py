"""`python -m tests.gpu [checks|benchmarks]` runs all checks and benchmarks on a machine with a GPU, and prints a table.

run_on_gpu.sh prepares a bare machine for it. The exit code is 1 if a check or a benchmark failed. A check that fails
ends its job, and another job runs the remaining checks, at most MOST_JOBS times. Checks run at the same time if there
are enough cores, because such machines are expensive. Benchmarks and races need the whole GPU, and run one by one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.gpu import jobs
from tests.parallel.jobs import ROOT, checks, explain

MOST_JOBS = 6
TOGETHER = max((os.cpu_count() or 1) // 3, 1)  # jobs at the same time
SECONDS, SECONDS_OF_A_JOB = 450, 120  # limits for all jobs together, and for one job
TORCH = {"TORCH_TENSORS_ON": "cuda"}
BENCH = ["-m", "hvdlite.bench", "allreduce", "--device", "cuda"]
STEPS = ["-m", "hvdlite.bench", "step", "--device", "cuda", "--steps", "15"]
LONG = ["--min", "256M", "--max", "1G", "--iters", "7", "--algorithms", "ipc,ring,ring_whole,staged,mpi_host,copy"]


@dataclass(frozen=True)
class Row:
    """A job of `size` ranks: checks, or a program's arguments. alone: no other job runs at the same time."""

    name: str
    size: int
    checks: tuple[str, ...] = ()
    program: tuple[str, ...] = ()
    extra: Mapping[str, str] = field(default_factory=dict)
    alone: bool = False


ON_GPU = {"TENSORFLOW_TENSORS_ON": "gpu", "NVIDIA_TF32_OVERRIDE": "0"}
TENSORFLOW = (  # if TensorFlow is installed
    Row("TensorFlow: placement, races", 2, ("gpu/tensorflow_gpu",), extra=ON_GPU),
    Row("TensorFlow: collectives, names, alike", 2,
        ("tensorflow_collectives", "tensorflow_names", "tensorflow_alike"), extra=ON_GPU),
    Row("TensorFlow: training, options", 2, ("tensorflow_training", "tensorflow_options"), extra=ON_GPU),
    Row("Keras on TensorFlow: callbacks", 2, ("tensorflow_callbacks", "tensorflow_resuming"), extra=ON_GPU),
    Row("TensorFlow: process sets, training, elastic", 3,
        ("tensorflow_sets", "tensorflow_training", "tensorflow_elastic"), extra=ON_GPU),
    Row("TensorFlow: gradients", 4, ("gpu/tensorflow_gpu.check_gradients_are_reduced_on_the_gpu",), extra=ON_GPU),
    Row("Keras on TensorFlow: digits", 2, program=("examples/keras_digits.py",)),
) if importlib.util.find_spec("tensorflow") else ()  # fmt: skip
ON_TORCH = {"KERAS_BACKEND": "torch"}
ON_JAX = {"KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_DEFAULT_MATMUL_PRECISION": "float32"}
KERAS = tuple(
    Row(f"Keras on {backend}", 2, ("backends_keras",), extra=extra)
    for backend, extra in (("torch", ON_TORCH), ("jax", ON_JAX)) if importlib.util.find_spec(backend)
) if importlib.util.find_spec("keras") else ()  # fmt: skip
TORCH_CHECKS = ("torch_gradients", "torch_steps", "torch_backwards", "torch_collectives", "torch_dtypes")
MORE_CHECKS = tuple(f"torch_{what}" for what in (
    "attach", "adasum", "alike", "batch_norm", "join", "movement", "parameters", "process_sets", "random", "sharded",
    "training.check_loss_curves", "training.check_a_model_of_more_than_a_megabyte",
    "training.check_every_path_gives_the_curve", "training.check_overlap_gives_the_same_bits", "training.check_lbfgs",
))  # fmt: skip
CHECKS = (
    Row("is the MPI CUDA-aware", 2, program=("-m", "hvdlite.cuda_trial")),
    *KERAS,
    *TENSORFLOW,
    Row("torch checks of tests/parallel", 2, TORCH_CHECKS, extra=TORCH),
    Row("more of them", 2, MORE_CHECKS, extra=TORCH),
    Row("CuPy arrays", 2, ("gpu/device_arrays",)),
    Row("an MPI that takes no device pointers", 2, ("gpu/staged",), extra={"OMPI_MCA_opal_cuda_support": "0"}),
    Row("CuPy arrays", 4, ("gpu/device_arrays",)),
    Row("gradients", 4, ("gpu/torch_cuda.check_gradients_every_way", "gpu/torch_cuda.check_low_precision")),
    Row("torch checks of tests/parallel", 4, ("torch_gradients", "torch_steps"), extra=TORCH),
    Row("races, AMP, layouts, placement, NCCL", 2, ("gpu/torch_cuda",), alone=True),
)
BENCHMARKS = (
    Row("training steps", 2, program=(*STEPS, "--json", "bench-gpu-steps.json"), alone=True),
    Row("all-reduce", 2, program=(*BENCH, "--max", "64M", "--seconds", "0.5", "--json", "bench-gpu.json"), alone=True),
    Row("all-reduce, long", 2, program=(*BENCH, *LONG, "--json", "bench-gpu-long.json"), alone=True),
)


def expanded(name: str) -> list[str]:
    """The names of a module's checks. The name of a single check stays as it is."""
    return [name] if "." in name else [f"{name}.{check}" for check in checks(name)]


def failures(row: Row) -> list[str]:
    """Run a row's checks. Returns the output of the checks that failed."""
    rest = [check for name in row.checks for check in expanded(name)]
    found: list[str] = []
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
    """The names of the GPUs and their driver's version."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"nvidia-smi reports no GPU ({error})"


def outcomes(rows: Sequence[Row]) -> Iterator[tuple[str, list[str]]]:
    """Run the rows, and print failures. Yields for each row a line of the table and its failures."""
    start = time.monotonic()

    def outcome(row: Row) -> tuple[str, list[str]]:
        began = time.monotonic()
        jobs.SECONDS = max(min(SECONDS_OF_A_JOB, int(start + SECONDS - began)), 10)
        found = failures(row) if row.checks else program_failures(row)
        line = f"{row.name + f', {row.size} ranks':45} {time.monotonic() - began:5.0f} s  {'FAILED' if found else 'ok'}"
        print("\n".join((line, *found)), flush=True)
        return line, found

    with ThreadPoolExecutor(TOGETHER) as pool:
        yield from pool.map(outcome, [row for row in rows if not row.alone])
    yield from map(outcome, [row for row in rows if row.alone])


def main(arguments: Sequence[str]) -> int:
    parts = {"checks": CHECKS, "benchmarks": BENCHMARKS}
    rows = parts[arguments[0]] if arguments else (*CHECKS, *BENCHMARKS)
    lines, failed = [], False
    lines += [
        f"{name} is not installed: NOT RUN" for name, of in (("TensorFlow", TENSORFLOW), ("Keras", KERAS)) if not of
    ]
    for line, found in outcomes(rows):
        failed |= bool(found)
        lines += [line, *(f"    {text.partition(':')[0]}" for text in found)]
    print("\n".join(("", machine(), time.strftime("%Y-%m-%d"), *lines)))
    return int(failed)


if __name__ == "__main__":
    assert Path.cwd() == ROOT, f"run it in {ROOT}"
    sys.exit(main(sys.argv[1:]))
