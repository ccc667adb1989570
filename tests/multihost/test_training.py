"""Two hosts with two ranks each train to the weights that one host with four ranks reaches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launcher.conftest import Runner, available
from tests.multihost.hosts import Hosts

torch = pytest.importorskip("torch")
DIGITS = (sys.executable, str(Path(__file__).parent / "scripts" / "digits.py"))


@pytest.fixture
def runner(pair: Hosts, tmp_path: Path) -> Runner:
    """With one MPI only; cheaper tests cover the differences between MPIs."""
    return Runner(available()[0], tmp_path, prefix=pair[0].command([]))


def train(runner: Runner, hosts: str, algorithm: str) -> tuple[list[str], np.ndarray]:
    """What rank 0 prints (hosts, accuracy, digest), and the weights."""
    weights = runner.tmpdir / f"{hosts}-{algorithm}"
    settings = ("-x", f"HVDLITE_ALGORITHM={algorithm}", "-x", f"WEIGHTS={weights}")
    job = runner.run("--no-prefix", "-H", hosts, *settings, *DIGITS, limit=100.0)
    assert job.returncode == 0, job.stderr
    return job.stdout.split(), torch.load(weights).numpy()


@pytest.mark.full
def test_two_hosts_reach_the_weights_of_one(runner: Runner) -> None:
    """The same algorithm gives the same bits. Another algorithm sums four float32 in another order, with a difference of at
    most 3 units in the last place. 40 steps of this network make 1e-6 of that (seen). A wrong sum is off by 1e-3."""
    (one, accuracy, digest), weights = train(runner, "hosta:4", "ring")
    assert one == "1" and float(accuracy) > 0.9
    (two, _, same), _ = train(runner, "hosta:2,hostb:2", "ring")
    assert two == "2" and same == digest
    (two, _, _), chosen = train(runner, "hosta:2,hostb:2", "auto")
    assert two == "2" and np.abs(chosen - weights).max() < 1e-4


@pytest.mark.full
def test_the_overlap_benchmark_runs(runner: Runner) -> None:
    """Only the presence of the figures is tested: on shared cores and a fast network their values vary."""
    path = runner.tmpdir / "overlap.json"
    bench = (sys.executable, "-m", "hvdlite.bench", "overlap", "--models", "cnn", "--steps", "3", "--json", str(path))
    job = runner.run("--no-prefix", "-H", "hosta:1,hostb:1", *bench, limit=60.0)
    assert job.returncode == 0 and "CNN" in job.stdout, job.stderr
    here, alone, elsewhere = json.loads(path.read_text())["rows"]
    assert here["batch"] >= 16 and "alone" in alone["name"] and "elsewhere" in elsewhere["name"]
    for row in (here, alone, elsewhere):
        assert row["seconds"].keys() == {"forward", "local", "end", "hvdlite"} and min(row["seconds"].values()) > 0
        assert row["parameters"] == here["parameters"] and len(row["quartiles"]) == 3
