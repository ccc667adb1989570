"""The examples run as README says, and reach their accuracy."""

from __future__ import annotations

import gzip
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
HVDLITERUN = [sys.executable, "-m", "hvdlite_launcher.cli"]
LAUNCH = [*HVDLITERUN, "--no-prefix", "-np", "2", sys.executable]


def run(*arguments: str, launch: Sequence[str] = LAUNCH) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*launch, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"},
    )


def test_digits_reach_97_percent_and_only_rank_0_prints() -> None:
    done = run("examples/torch_digits.py")
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    found = re.fullmatch(r"2 processes: held-out accuracy ([\d.]+)%, [\d.]+ s, \d+ images/s", last)
    assert found, done.stdout
    assert float(found[1]) >= 97
    assert len(re.findall(r"^epoch  1/", done.stdout, re.MULTILINE)) == 1


def test_the_helpers_do_what_users_write_by_hand() -> None:
    """Both scripts print and log the same, on three ranks with uneven shares of 1501 and 296 images."""
    launch = [*HVDLITERUN, "--no-prefix", "-np", "3", sys.executable]
    by_hand, helped = (run(f"examples/{name}.py", launch=launch) for name in ("everyday_before", "everyday"))
    assert by_hand.returncode == helped.returncode == 0, by_hand.stderr + helped.stderr
    assert by_hand.stdout == helped.stdout
    found = re.fullmatch(
        r"9610 weights .* 3 processes\n(?:epoch \d: loss [\d.]+, held-out accuracy ([\d.]+)%\n){6}", helped.stdout
    )
    assert found and float(found[1]) >= 85, helped.stdout
    logged = [re.findall(r"rank .*", done.stderr) for done in (by_hand, helped)]
    assert logged == [["rank 0 INFO: 16 steps in each epoch"]] * 2, logged


def test_the_pytorch_tutorial_trains_on_two_ranks_and_goes_on(tmp_path: Path) -> None:
    """The script for one process and the one for several reach the same accuracy. All ranks end with the same weights."""
    before = run("examples/tutorial_torch_before.py", "--checkpoint", str(tmp_path / "one"), launch=[sys.executable])
    arguments = ["examples/tutorial_torch.py", "--checkpoint", str(tmp_path / "two")]
    first, second = run(*arguments, "--epochs", "6"), run(*arguments, "--epochs", "10")
    assert before.returncode == first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert before.stdout.startswith("epochs 1 to 10, 45 steps in each\n")
    assert first.stdout.startswith("epochs 1 to 6, 23 steps in each\n") and "epochs 7 to 10, 23" in second.stdout
    for done in (before, second):
        assert float(re.findall(r"epoch 10: held-out accuracy ([\d.]+)%", done.stdout)[0]) >= 91, done.stdout
    sums = re.findall(r"rank (\d): the sum of all weights is (-?[\d.]+)", second.stdout)
    assert [rank for rank, _ in sums] == ["0", "1"] and sums[0][1] == sums[1][1], second.stdout


def test_a_function_runs_on_two_ranks_and_returns_results() -> None:
    done = run("examples/run_in_notebook.py", launch=[sys.executable])
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^rank (\d): held-out accuracy ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert [rank for rank, _ in found] == ["0", "1"] and float(found[0][1]) >= 88, done.stdout
    assert "[0]<stdout>:epoch 5: loss" in done.stdout and "'0.weight': (256, 64)" in done.stdout, done.stdout


def accuracy(*arguments: str) -> float:
    """The accuracy in percent, from an example's last line."""
    done = run(*arguments)
    assert done.returncode == 0, done.stderr
    found = re.match(r"2 processes: held-out accuracy ([\d.]+)%", done.stdout.strip().splitlines()[-1])
    assert found, done.stdout
    return float(found[1])


@pytest.mark.parametrize("example", [
    "keras_digits", pytest.param("keras_chain", marks=pytest.mark.full), "tensorflow_tape",
    pytest.param("tensorflow_v1_hook", marks=pytest.mark.full),
])  # fmt: skip
def test_tensorflow_and_keras_reach_97_percent(example: str) -> None:
    assert accuracy(f"examples/{example}.py") >= 97


@pytest.mark.parametrize("example", ["torch_ddp", "torch_fsdp", "torch_pipeline"])
def test_torch_distributed_reaches_95_percent(example: str) -> None:
    assert accuracy(f"examples/{example}.py") >= 95


def test_a_sharded_optimizer_reaches_95_percent_and_its_checkpoint_is_read_again(tmp_path: Path) -> None:
    """Each of two ranks has half of the state. The second run goes on after the first one's epochs."""
    arguments = ["examples/torch_sharded.py", "--checkpoint", str(tmp_path / "digits.pt"), "--epochs"]
    assert accuracy(*arguments, "6") >= 95
    done = run(*arguments, "1")
    found = re.search(
        r"([\d,]+) weights; .* by rank: ([\d,]+), ([\d,]+)\n.*accuracy ([\d.]+)% after 7 epochs", done.stdout
    )
    assert found, done.stdout
    weights, *held = (int(text.replace(",", "")) for text in found.groups()[:3])
    assert max(held) <= 1.02 * weights and float(found[4]) >= 95


def test_a_hundredth_of_the_gradients_reaches_95_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank counts as a host, so that gradients are compressed."""
    monkeypatch.setenv("HVDLITE_COMPRESS_WITHIN_HOST", "1")
    assert accuracy("examples/torch_compression.py") >= 95


@pytest.mark.parametrize("arguments", [["--every", "8"], ["--every", "16", "--diloco"]])
def test_average_weights_reach_93_percent(arguments: list[str]) -> None:
    """DiLoCo makes only 24 outer steps."""
    assert accuracy("examples/torch_local_sgd.py", *arguments) >= 93


@pytest.mark.parametrize("topology", ["ring", pytest.param("one-peer", marks=pytest.mark.full)])
def test_averages_among_neighbours_reach_95_percent(topology: str) -> None:
    """Four ranks: on a ring of two or three, each rank would have all others as neighbours."""
    launch = [*HVDLITERUN, "--no-prefix", "-np", "4", sys.executable]
    done = run("examples/torch_decentralized.py", "--topology", topology, launch=launch)
    assert done.returncode == 0, done.stderr
    found = re.search(r"rank 0 was ([\d.]+)% away .*\n4 processes: held-out accuracy ([\d.]+)%", done.stdout)
    assert found and 0 < float(found[1]) < 5 and float(found[2]) >= 95, done.stdout


def test_a_parameter_server_reaches_93_percent_and_a_slow_rank_does_less() -> None:
    """1500 images in batches of 32, 30 times."""
    done = run("examples/parameter_server.py", "--slow", "0.03")
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(
        r"batches by rank: \[(\d+), (\d+)\]; stalest update: \d+\n2 processes: held-out accuracy ([\d.]+)%\n",
        done.stdout,
    )
    assert found, done.stdout
    slow, other = int(found[1]), int(found[2])
    assert slow + other == 30 * 47 and 2 * slow < other and float(found[3]) >= 93, done.stdout


@pytest.mark.full
def test_a_sharded_checkpoint_is_read_again(tmp_path: Path) -> None:
    """The second run begins with the first one's weights."""
    arguments = ["examples/torch_fsdp.py", "--checkpoint", str(tmp_path / "digits"), "--epochs"]
    assert accuracy(*arguments, "8") >= 95
    assert accuracy(*arguments, "1") >= 95


@pytest.mark.full
def test_lightning_reaches_95_percent_and_only_rank_0_shows_and_writes(tmp_path: Path) -> None:
    """If rank 1 wrote a checkpoint, too, Lightning would give it another name (-v1)."""
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("NOT RUN: lightning is not installed (pip install 'hvdlite[libraries]')")
    launch = [*HVDLITERUN, "-np", "2", sys.executable]
    done = run("examples/lightning_digits.py", "--folder", str(tmp_path), launch=launch)
    assert done.returncode == 0, done.stderr
    found = re.search(r"2 processes: held-out accuracy ([\d.]+)%, best epoch: (.*)", done.stdout)
    assert found and float(found[1]) >= 95, done.stdout
    assert [str(path) for path in tmp_path.iterdir()] == [found[2]]
    assert "[0]<stdout>:Epoch" in done.stdout.replace("\r", "\n") and "[1]<stdout>" not in done.stdout, done.stdout


@pytest.mark.full
@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_libraries_that_choose_mpi_reach_93_percent(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"NOT RUN: {library} is not installed (pip install 'hvdlite[libraries]')")
    monkeypatch.setenv("HVDLITE_AS_MPI", "1")
    folder = ["--folder", str(tmp_path)] if library == "transformers" else []
    assert accuracy(f"examples/{library}_digits.py", *folder) >= 93


FRAMEWORKS = [["torch"], *(["keras", "--keras-backend", backend] for backend in ("tensorflow", "torch", "jax"))]


@pytest.mark.full
def test_one_script_trains_with_any_framework() -> None:
    """All frameworks have the same lines about distribution and the same results, except for the initial weights."""
    reached = {" ".join(choice): accuracy("examples/train_any.py", "--framework", *choice) for choice in FRAMEWORKS}
    assert min(reached.values()) >= 97, reached
    assert max(reached.values()) - min(reached.values()) <= 2, reached


def test_join_trains_on_uneven_data() -> None:
    """1500 images in shares of one and two thirds: 500 and 1000, in batches of 32."""
    done = run("examples/torch_join.py")
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"batches per rank and epoch: \[16, 32\]; held-out accuracy ([\d.]+)%\n", done.stdout)
    assert found and float(found[1]) >= 94, done.stdout


def write_idx(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    with gzip.open(path, "wb") as file:
        file.write(header + array.astype(np.uint8).tobytes())


@pytest.mark.full
def test_mnist_trains_on_local_files(tmp_path: Path) -> None:
    """The files are in MNIST's format: images with a brightest row that is the class."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 640), ("t10k", 100)):
        labels = rng.integers(0, 10, count)
        images = rng.integers(0, 60, (count, 28, 28))
        images[np.arange(count), 2 * labels + 4] = 255
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", labels)
    arguments = ["--data", str(tmp_path), "--checkpoint", str(tmp_path / "run.pt")]
    done = run("examples/torch_mnist.py", *arguments, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    done = run("examples/torch_mnist.py", *arguments, "--epochs", "5")
    assert done.returncode == 0, done.stderr
    assert re.findall(r"epoch (\d)", done.stdout) == ["3", "4", "5"]
    assert float(re.findall(r"accuracy ([\d.]+)%", done.stdout)[-1]) >= 90, done.stdout


def test_mnist_without_files_says_what_to_do(tmp_path: Path) -> None:
    done = run("examples/torch_mnist.py", "--data", str(tmp_path))
    assert done.returncode == 1
    assert "put MNIST's four idx files there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_wheel_is_pure_and_installs_no_stray_module(tmp_path: Path) -> None:
    """It is built from a copy of the tree, and has only hvdlite, its launcher and plug-in, and no compiled file."""
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns(".*", "build", "*.egg-info")  # files of an earlier build would get in
    shutil.copytree(ROOT, source, ignore=left_out)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(tmp_path), str(source)],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "hvdlite",
        "hvdlite_launcher",
        "hvdlite_torch_plugin",
    }
    assert not [name for name in names if name.endswith((".so", ".pyd", ".c"))]
