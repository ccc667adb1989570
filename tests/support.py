"""The table of what was tested: `pytest --record docs/support.json` writes it, and the documentation shows it.

A row has an area, the versions that matter to it, how many ranks its jobs had, what passed, where and when. A run
replaces the rows of its areas and versions; rows of other versions stay, with their dates. A run of a few tests would
write rows that say less than they seem to, so only `.ci/run` and `tests/gpu` record.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path

from hvdlite_launcher import UsageError
from hvdlite_launcher.probe import find_mpi

MPI = "the MPI"
AREAS = (
    (r"tests/parallel/test_ranks.*\[torch_", "PyTorch: the optimizer and its options", ("torch", MPI)),
    (r"tests/parallel/test_ranks.*\[tensorflow_", "TensorFlow and Keras on it", ("tensorflow", "keras", MPI)),
    (r"tests/parallel/test_ranks.*\[distributed_", "torch.distributed with the backend hvdlite", ("torch", MPI)),
    (
        r"tests/parallel/test_(distributed|torch_suite)",
        "torch.distributed: whole jobs, and tests of PyTorch",
        ("torch", MPI),
    ),
    (r"tests/parallel/test_ranks", "collectives, process sets, join, elastic.run", ("numpy", MPI)),
    (r"tests/parallel/test_keras.*tensorflow", "Keras on TensorFlow", ("keras", "tensorflow", MPI)),
    (r"tests/parallel/test_keras.*torch", "Keras on PyTorch", ("keras", "torch", MPI)),
    (r"tests/parallel/test_keras.*jax", "Keras on JAX", ("keras", "jax", MPI)),
    (
        r"tests/parallel/test_libraries",
        "Lightning, accelerate, transformers",
        ("lightning", "accelerate", "transformers"),
    ),
    (r"tests/parallel/test_pages|tests/examples", "examples, and the code in the documentation", ("torch", MPI)),
    (r"tests/parallel", "failures: ranks that stop, hang, vanish or are killed", (MPI,)),
    (r"tests/launcher", "hvdliterun on one host", (MPI,)),
    (r"tests/multihost/test_slurm", "Slurm on two hosts (network namespaces)", ("Slurm", MPI)),
    (r"tests/multihost", "several hosts over ssh (network namespaces)", (MPI,)),
    (r"tests/unit", "units, without MPI", ("numpy",)),
)
"""What a test belongs to, by the first pattern that its name matches, and what its row names beside Python."""
PACKAGES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX", "numpy": "NumPy"}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        area: What was tested.
        versions: What it was tested with.
        ranks: The numbers of ranks of the jobs, "" where they are not known.
        passed: How many tests passed.
        failed: How many failed.
        where: The machine.
        date: The day, in UTC, as 2026-11-30.
    """

    area: str
    versions: str
    ranks: str
    passed: int
    failed: int
    where: str
    date: str


def area(test: str) -> tuple[str, tuple[str, ...]] | None:
    """The area of a test and what its row names, or None for tests that are in no row: those on GPUs."""
    return next(((title, named) for pattern, title, named in AREAS if re.match(pattern, test)), None)


@cache
def version(name: str) -> str:
    """A package or an MPI with its version; "" if it is not here."""
    if name == MPI:
        try:
            mpi = find_mpi(os.environ, os.environ.get("HVDLITE_TEST_MPI"))
        except UsageError:
            return ""
        return f"{mpi.family.value} {'.'.join(map(str, mpi.version))}"
    if name == "Slurm":
        srun = shutil.which("srun")
        told = subprocess.run([srun, "--version"], capture_output=True, text=True).stdout if srun else ""
        return f"Slurm {'.'.join(re.findall(r'[0-9]+', told)[:2])}" if told else ""
    for package in (name, f"{name}-cpu"):  # TensorFlow has a build without CUDA
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{PACKAGES.get(name, name)} {metadata.version(package).partition('+')[0]}"
    return ""


def rows(outcomes: Iterable[tuple[str, str]]) -> list[Row]:
    """The rows of one run.

    Args:
        outcomes: The name of each test, and "passed" or "failed".
    """
    counts: defaultdict[tuple[str, tuple[str, ...]], Counter[str]] = defaultdict(Counter)
    sizes: defaultdict[str, set[int]] = defaultdict(set)
    for test, outcome in outcomes:
        found = area(test)
        if found:
            counts[found][outcome] += 1
            sizes[found[0]].update(map(int, re.findall(r"::test_ranks\[\w+-(\d)-", test)))
    date = datetime.now(UTC).date().isoformat()
    where = f"Linux {platform.machine()}, {os.cpu_count()} cores"
    python = f"Python {'.'.join(map(str, sys.version_info[:2]))}"
    return [
        Row(
            title,
            ", ".join(filter(None, [*map(version, named), python])),
            ", ".join(map(str, sorted(sizes[title]))),
            count["passed"],
            count["failed"],
            where,
            date,
        )
        for (title, named), count in counts.items()
    ]


def read(path: Path) -> list[Row]:
    """The rows of a file; none if there is no such file."""
    return [Row(**each) for each in json.loads(path.read_text())] if path.exists() else []


def record(path: Path, found: list[Row]) -> None:
    """Write the rows into a file, in place of those of the same areas and versions. The newest are first."""
    kept = {(row.area, row.versions): row for row in [*read(path), *found]}
    order = [title for _, title, _ in AREAS]
    newest = sorted(kept.values(), key=lambda row: row.date, reverse=True)
    lines = [json.dumps(asdict(row)) for row in sorted(newest, key=lambda row: order.index(row.area))]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
