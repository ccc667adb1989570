"""examples/README.md lists every file of examples/, and nothing else."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_gallery_lists_every_example_once() -> None:
    told = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(told, cwd=EXAMPLES, capture_output=True, text=True).stdout.split() or [
        str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc"
    ]  # a copy of the tree may have no git
    links = re.findall(r"\[([^]]+)\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text())
    assert all(text == target for text, target in links)
    assert sorted(target for _, target in links) == sorted({*files} - {"README.md"})
