"""Checkpoints of sharded optimizers between jobs: killed while they save, and of other numbers of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel import jobs

FULL = pytest.mark.full


def run(size: int, path: Path, *arguments: object, killed: bool = False) -> dict[str, str]:
    """The digests that a job prints, by what it says."""
    result = jobs.run(size, ["-m", "tests.parallel.sharded_job", str(path), *map(str, arguments)])
    assert (result.code != 0) == killed, result.output
    lines = [line.split() for line in result.output.splitlines()]
    return {" ".join(words[:-1]): words[-1] for words in lines if words and words[0] in ("loaded", "saved", "ended")}


@pytest.mark.parametrize(
    ("size", "kill", "counts"),
    [
        pytest.param(2, (0, 2, "replace"), 2, marks=FULL),
        pytest.param(4, (3, 1, "fsync"), 2, marks=FULL),  # in its part
        pytest.param(4, (0, 2, "fsync"), 2, marks=FULL),  # all parts are written
        pytest.param(4, (0, 3, "replace"), 2, marks=FULL),  # some parts have their names
        pytest.param(4, (0, 5, "replace"), 2, marks=FULL),  # all parts have theirs
        pytest.param(4, (0, 3, "unlink"), 3, marks=FULL),  # older parts are being removed
    ],
)
def test_a_job_killed_while_it_saves(tmp_path: Path, size: int, kill: tuple[int, int, str], counts: int) -> None:
    """The next job goes on from the checkpoint that counts, to the bits of a job that was not killed."""
    path = tmp_path / "run.pt"
    whole = run(size, tmp_path / "other.pt", "--steps", 4, "--save", 2, 3)
    died = run(size, path, "--steps", 4, "--save", 2, 3, "--kill", *kill, killed=True)
    assert "saved 2 0" in died and "saved 3 0" not in died
    again = run(size, path, "--steps", 4, "--save", 4)
    assert again[f"loaded {counts}"] == whole[f"saved {counts} 0"]
    assert again[f"ended {counts}"] == whole["ended 0"]
    parts = [each for each in tmp_path.iterdir() if each.name.startswith("run.pt.")]
    assert len(parts) == size  # and none of the killed save


@FULL
def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved by 4 ranks, loaded by 2, by a process without a launcher, and by 3; saved by 2, loaded by 4."""
    path = tmp_path / "run.pt"
    saved = run(4, path, "--steps", 2, "--save", 2)["saved 2 0"]
    for size in (2, 0, 3):
        assert run(size, path) == {"loaded 2": saved, "ended 2": saved}
    saved = run(2, path, "--steps", 4, "--save", 4)["saved 4 2"]
    assert run(4, path) == {"loaded 4": saved, "ended 4": saved}
    assert run(0, path)["loaded 4"] == saved
