"""The code in the documentation runs: the Python blocks of each page on two ranks, in one job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from docs import blocks

ROOT = Path(__file__).resolve().parents[2]
JOBS = [
    pytest.param(
        page,
        full,
        id=f"{page.relative_to(blocks.DOCS)}{'-full' * full}",
        marks=[pytest.mark.full] * (full or blocks.page_mark(page) == "full"),
    )
    for page in blocks.pages()
    for full in (False, True)
    if blocks.has_job(page, full)
]


@pytest.mark.parametrize(("page", "full"), JOBS)
def test_the_blocks_of_a_page_run(page: Path, full: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hvdlite_launcher.cli", "-np", "2", sys.executable, "-m", "tests.parallel.page"]
    done = subprocess.run(
        [*command, str(page), *["full"] * full],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"},
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
