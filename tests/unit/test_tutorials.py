"""The tutorials show lines of the examples as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.blocks import blocks

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted(page for page in (ROOT / "docs/tutorials").glob("*.md") if page.name != "index.md")


def shown(page: Path) -> list[Path]:
    """The scripts that a page includes, or names by a path."""
    text = page.read_text()
    return [path for path in sorted((ROOT / "examples").glob("*.py")) if f"examples/{path.name}" in text]


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_lines_of_diffs_are_those_of_the_scripts(page: Path) -> None:
    """A line that a diff adds or keeps stands in one of the page's scripts. Spaces and comments at its end may differ."""
    lines = {line.partition("  #")[0].strip() for path in shown(page) for line in path.read_text().splitlines()}
    for block in blocks(page):
        for line in block.text.splitlines() if block.kind == "diff" else ():
            assert line.startswith("-") or line[1:].partition("  #")[0].strip() in lines, line


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.name)
def test_a_tutorial_has_a_complete_script_and_what_can_go_wrong(page: Path) -> None:
    text = page.read_text()
    assert "{literalinclude} ../../examples/" in text and "\n## What can go wrong\n" in text
