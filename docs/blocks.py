"""The blocks of code in a page, and which of them run.

All Python blocks of a page run one after another, in one namespace, on each rank of one job. A comment on the line
before a block says otherwise, and gives the reason:

    <!-- not run: it needs wandb -->       only compiled
    <!-- full: it needs TensorFlow -->     runs in a second job, which only the full tests start

Below the title, `not run` holds for all blocks, and `full` for both jobs: a job of more than five seconds, say.

Code that a page's blocks need and readers do not stands in a comment of its own:

    <!-- hidden
    model = torch.nn.Linear(2, 2)
    -->

`<!-- hidden full` belongs to the second job, and `<!-- hidden both` to both.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
FENCE = re.compile(
    r"(?:^[ ]*<!-- (?P<mark>full|not run): (?P<reason>[^\n]+) -->\n+)?"
    r"^(?P<fence>[ ]*`{3,})(?P<kind>[^\n`]*)\n(?P<text>.*?)^(?P=fence)[ ]*$"
    r"|^<!-- (?P<hidden>hidden(?: full| both)?)\n(?P<code>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
BELOW_TITLE = re.compile(r"\A#[^\n]*\n+<!-- (?P<mark>full|not run): [^\n]+ -->$", re.MULTILINE)
PYTHON = ("python", "py", "{code-block} python")
SHELL = ("console", "bash", "sh", "shell")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        kind: The word after the fence, such as `python`.
        text: The lines of the block, without their common indentation.
        line: The number of the first line in the page.
        mark: "", "full", "not run", "hidden", "hidden full" or "hidden both".
    """

    kind: str
    text: str
    line: int
    mark: str

    def runs(self, full: bool) -> bool:
        """Whether the block is part of the page's first job, or with `full` of its second one."""
        marks = ("full", "hidden full", "hidden both") if full else ("", "hidden", "hidden both")
        return self.kind in PYTHON and self.mark in marks


def pages() -> list[Path]:
    """All pages that Sphinx builds, in the order of their paths."""
    return sorted(path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in ("_build", "packaging"))


def page_mark(page: Path) -> str:
    """What the comment below the title says about all blocks: "full", "not run" or ""."""
    found = BELOW_TITLE.search(page.read_text())
    return found["mark"] if found else ""


def blocks(page: Path) -> list[Block]:
    """All blocks of a page, in its order."""
    text = page.read_text()
    never = "not run" if page_mark(page) == "not run" else ""
    found = []
    for each in FENCE.finditer(text):
        hidden = each["hidden"] is not None
        kind = "python" if hidden else each["kind"].strip()
        line = text.count("\n", 0, each.start("code" if hidden else "text")) + 1
        mark = each["hidden"] or each["mark"] or never
        found.append(Block(kind, textwrap.dedent(each["code" if hidden else "text"]), line, mark))
    return found


def has_job(page: Path, full: bool) -> bool:
    """Whether the page has a block that a reader sees, and that runs."""
    return any(block.runs(full) and "hidden" not in block.mark for block in blocks(page))


def run(page: Path, full: bool) -> None:
    """Run the page's blocks. Tracebacks name the page and its line."""
    namespace = {"__name__": "__main__"}
    for block in blocks(page):
        if block.runs(full):
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), namespace)
