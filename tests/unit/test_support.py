"""The table of what was tested."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from docs import generate
from tests import support

ROOT = Path(__file__).resolve().parents[2]
OLD = support.Row("hvdliterun on one host", "MPICH 5.0.1, Python 3.11", "", 7, 0, "Linux x86_64, 2 cores", "2026-11-29")
NEW = support.Row("hvdliterun on one host", "MPICH 5.0.2, Python 3.11", "", 8, 1, "Linux x86_64, 2 cores", "2026-11-30")


@pytest.mark.parametrize(("test", "area"), [
    ("tests/parallel/test_ranks.py::test_ranks[torch_sharded-2-step]", "PyTorch: the optimizer and its options"),
    ("tests/parallel/test_ranks.py::test_ranks[algorithms-3-ring]", "collectives, process sets, join, elastic.run"),
    ("tests/parallel/test_keras_backends.py::test_keras_on[jax-backends_keras-fit]", "Keras on JAX"),
    ("tests/multihost/test_slurm.py::test_srun", "Slurm on two hosts (network namespaces)"),
    ("tests/gpu/test_gpu.py::test_on_gpu[ring]", None),
])  # fmt: skip
def test_areas(test: str, area: str | None) -> None:
    found = support.area(test)
    assert (found and found[0]) == area


def test_every_test_is_in_an_area_except_those_on_gpus() -> None:
    for path in ROOT.glob("tests/*/test_*.py"):
        name = str(path.relative_to(ROOT))
        kinds = ("tensorflow", "torch", "jax") if path.name == "test_keras_backends.py" else ("",)
        for kind in kinds:
            assert (support.area(f"{name}::test[{kind}]") is None) is name.startswith("tests/gpu/"), name


def test_a_run_is_one_row_for_each_area() -> None:
    tests = [f"tests/parallel/test_ranks.py::test_ranks[torch_steps-{size}-step]" for size in (2, 3, 3)]
    (row,) = support.rows([(test, "passed") for test in tests] + [(tests[0], "failed")])
    assert (row.passed, row.failed, row.ranks) == (3, 1, "2, 3")
    assert re.fullmatch(r"PyTorch [\d.]+, .* [\d.]+, Python [\d.]+", row.versions)


def test_versions_of_frameworks_are_found() -> None:
    for name, shown in support.PACKAGES.items():
        assert re.fullmatch(rf"{shown} \d+\.[\d.]+", support.version(name)), name


def test_rows_of_other_versions_stay(tmp_path: Path) -> None:
    file = tmp_path / "support.json"
    support.record(file, [OLD])
    support.record(file, [NEW])
    support.record(file, [NEW])
    assert support.read(file) == [NEW, OLD]
    support.record(file, [replace(OLD, passed=9)])
    assert [row.passed for row in support.read(file)] == [8, 9]


def test_the_page_has_all_rows() -> None:
    rows, text = support.read(ROOT / "docs/support.json"), generate.support()
    assert rows and text.count("\n|") == len(rows) + 1
    for row in rows:
        assert row.versions in text and str(row.passed) in text
        assert (f"**{row.failed} failed**" in text) or not row.failed
