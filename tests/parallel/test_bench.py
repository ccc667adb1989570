"""Short runs of benchmarks, which check all sums or weights themselves, and print the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread

from tests.parallel import jobs

ON_ONE_HOST = ["arena", "tensor", "ring", "halving_doubling", "auto", "mpi", "mpi_huge", "gloo", "memcpy"]


def test_allreduce(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    options = ["--min", "64K", "--max", "4M", "--step", "4", "--iters", "1", "--json", str(path)]
    result = jobs.run(2, ["-m", "hvdlite.bench", "allreduce", *options])
    assert result.code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert [(row["nbytes"] >> 10, [*row["seconds"]]) for row in rows] == [
        (k, ON_ONE_HOST) for k in (64, 256, 1024, 4096)
    ]
    assert "[1/5] 64 KiB" in result.output and "[5/5] one scalar, " in result.output  # how far it has come
    assert "MPI in huge pages / arena" in result.output and max(map(len, result.output.splitlines())) <= 120


def test_fsdp(tmp_path: Path) -> None:
    """The benchmark itself compares the weights of hvdlite and gloo."""
    path, plot = tmp_path / "found.json", tmp_path / "found.png"
    result = jobs.run(2, ["-m", "hvdlite.bench", "fsdp", "--steps", "3", "--json", str(path), "--plot", str(plot)])
    assert result.code == 0, result.output
    (row,) = json.loads(path.read_text())["rows"]
    assert [*row["seconds"]] == ["whole", "none", "hvdlite", "gloo"] and min(row["seconds"].values()) > 0
    for key, (low, high) in row["spread"].items():
        assert low <= row["seconds"][key] <= high
    assert row["overhead"].keys() == {"hvdlite", "gloo"} and row["ratio"] * row["overhead"]["gloo"] == pytest.approx(
        row["overhead"]["hvdlite"]
    )
    assert plot.exists() and "FSDP2 step" in result.output and max(map(len, result.output.splitlines())) <= 120


def test_memory(tmp_path: Path) -> None:
    """The benchmark itself compares the weights of all contenders."""
    path = tmp_path / "found.json"
    options = ["--small", "--turns", "1", "--steps", "1", "--json", str(path)]
    result = jobs.run(2, ["-m", "hvdlite.bench", "memory", *options])
    assert result.code == 0, result.output
    found = json.loads(path.read_text())
    rows, weights = found["rows"], 4 * found["parameters"]
    assert [*rows] == ["unsharded", "sharded", "gradients", "ddp", "zero", "fsdp"]
    parts = {key: max(row["state"]) / (2 * weights) for key, row in rows.items()}
    assert parts == pytest.approx({key: 1 if key in ("unsharded", "ddp") else 1 / 2 for key in rows}, rel=0.02)
    saved = max(rows["unsharded"]["memory"]) - max(rows["sharded"]["memory"])
    assert saved == pytest.approx(weights, rel=0.3)  # half of two states
    assert all(min(row["peak"]) >= min(row["memory"]) > weights and min(row["step"], row["backward"]) > 0
               for row in rows.values())  # fmt: skip
    for key, row in rows.items():  # of the only turn
        for other, ratio in row["ratios"]["step()"].items():
            assert other in ("unsharded", "sharded") and other != key
            assert ratio == pytest.approx([row["step"] / rows[other]["step"]] * 3)
    assert rows["zero"]["ratios"]["both"].keys() == {"unsharded", "sharded"}
    assert all(low <= row[part] <= high for row in rows.values() for part, (low, high) in row["spread"].items())
    assert "[1/12] hvdlite, unsharded: warm-up" in result.output and "[12/12] " in result.output
    assert "both: backward" in result.output and max(map(len, result.output.splitlines())) <= 120


def test_compression(tmp_path: Path) -> None:
    """Each rank counts as a host. A second run takes the curves of the first one, and adds its network."""
    path, plot = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--problems", "digits", "--compressors", "topk", "--steps", "10", "--seeds", "2", "--timed", "1"]
    command, alone = ["-m", "hvdlite.bench", "compression", *options], {"HVDLITE_COMPRESS_WITHIN_HOST": "1"}
    result = jobs.run(2, [*command, "--link", "fast", "--json", str(path)], alone)
    assert result.code == 0, result.output
    first = json.loads(path.read_text())["rows"]
    assert [(row["problem"], row["compressor"]) for row in first] == [("digits", "none"), ("digits", "topk")]
    assert all(curve["steps"] == [*range(1, 11)] for row in first for curve in row["curves"])
    assert first[0]["curves"] != first[1]["curves"]
    again = ["--link", "slow", "--earlier", str(path), "--json", str(path), "--plot", str(plot)]
    result = jobs.run(2, [*command, *again], alone)
    assert result.code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    for row, before in zip(rows, first, strict=True):
        assert row["curves"] == before["curves"] and [*row["speeds"]] == ["fast", "slow"]
        assert row["speeds"]["fast"] == before["speeds"]["fast"] and row["speeds"]["slow"]["seconds"] > 0
    assert "[1/1] digits, CNN: seconds per step, slow\n" in result.output  # no training again
    assert 0 < rows[1]["speeds"]["slow"]["gradients"] < 4 * 71_000 / 10  # Top-K 1 % of 71 thousand float32
    assert plot.exists() and "slow" in result.output and max(map(len, result.output.splitlines())) <= 120


def test_strategies(tmp_path: Path) -> None:
    """A second run adds the first one's condition to its results. A slow rank takes the time that was asked for."""
    path, plot = tmp_path / "found.json", tmp_path / "found.png"
    command = ["-m", "hvdlite.bench", "strategies", "--steps", "8", "--seeds", "2"]
    result = jobs.run(2, [*command, "--link", "first", "--compute", "0", "--json", str(path)])
    assert result.code == 0, result.output
    first = json.loads(path.read_text())["rows"]
    again = ["--earlier", str(path), "--strategies", "local", "--compute", "10", "--slow", "1:4"]
    result = jobs.run(2, [*command, *again, "--json", str(path), "--plot", str(plot)])
    assert result.code == 0, result.output
    rows = json.loads(path.read_text())["rows"]
    assert rows[: len(first)] == first and {row["condition"] for row in first} == {"first"}
    condition = "this network, rank 1 computes 4 times as long"
    assert [(row["condition"], row["strategy"]) for row in rows[len(first) :]] == [
        (condition, "synchronous"),
        (condition, "local"),
    ]
    runs = [run for row in rows[len(first) :] for run in row["runs"]]
    assert all(0.04 <= run["update"] < 0.4 and run["losses"][0] > run["losses"][-1] for run in runs), runs
    assert all(run["losses"][0] == pytest.approx(runs[0]["losses"][0]) for run in runs[::2])  # equal first weights
    assert f"[1/4] {condition}: synchronous, seed 0\n" in result.output
    assert plot.exists() and condition in result.output and max(map(len, result.output.splitlines())) <= 120


def test_results_are_drawn_later(tmp_path: Path) -> None:
    """`draw` needs no launcher. Its picture has the same dots as that of the run."""
    path, plot, again = tmp_path / "found.json", tmp_path / "found.png", tmp_path / "again.png"
    options = ["ops", "--seconds", "0.01", "--json", str(path), "--plot", str(plot)]
    result = jobs.run(2, ["-m", "hvdlite.bench", *options])
    assert result.code == 0, result.output
    assert "[1/29] allreduce_, 4 bytes" in result.output and "[29/29] 8 calls in flight, " in result.output
    for row in json.loads(path.read_text())["rows"]:
        low, high = row["spread"]["hvdlite"]
        assert low <= row["seconds"] <= high
    command = [sys.executable, "-m", "hvdlite.bench", "draw", str(path), "--plot", str(again)]
    subprocess.run(command, check=True)
    assert (imread(plot) == imread(again)).all()
    path.write_text("{}")
    failed = subprocess.run(command, capture_output=True, text=True)
    assert failed.returncode == 2 and failed.stderr.startswith(f"{path} has no results of a benchmark")
