"""A short all-reduce benchmark: it checks every contender's sums by itself, and prints the results."""

from __future__ import annotations

import json
from pathlib import Path

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
    assert "MPI in huge pages / arena" in result.output and max(map(len, result.output.splitlines())) <= 120
