"""Docstrings are plain text in Google's style. This module writes them as reStructuredText that shows the same."""

from __future__ import annotations

import re


def adapted(text: str) -> list[str]:
    """A docstring's lines, as napoleon reads them without a warning."""
    text = re.sub(r"(?s)(^|\n\n)In this room .*?(\n\n|$)", r"\2", text)  # for developers
    text = re.sub(r"(`[^`]+`)(\w?)", lambda found: found[1] + (f"\\ {found[2]}" if found[2] else ""), text)
    text = re.sub(r"(?m)^( +\*args, )\*\*(\w+:)", r"\1\\*\\*\2", text)
    text = re.sub(r"(hvdliterun's )(--[a-z-]+)", r"\1``\2``", text)
    text = re.sub(r"(?m)^Raises, (\w)(.*:)$", lambda found: f"{found[1].upper()}{found[2]}\n\nRaises:", text)
    text = re.sub(r"(?m)^Returns:\n( +)(?=.*:)", r"Returns:\n\1\\\n\1", text)  # what is before a colon is no type
    text = re.sub(r"(?m)^\|.*\|$(\n\|.*\|$)+", lambda found: table(found[0]), text)
    return with_examples(text.split("\n"))


def table(text: str) -> str:
    """A table of Markdown as one of reStructuredText."""
    first, _, *rest = ([cell.strip() for cell in line[1:-1].split("|")] for line in text.split("\n"))
    rows = [first]
    for row in rest:
        if row[0]:
            rows.append(row)
        else:  # the row above goes on
            rows[-1] = [" ".join(both).strip() for both in zip(rows[-1], row, strict=True)]
    found = [".. list-table::", "   :header-rows: 1", ""]
    for row in rows:
        found += [f"   {'* -' if number == 0 else '  -'} {cell}" for number, cell in enumerate(row)]
    return "\n".join(found)


def with_examples(lines: list[str]) -> list[str]:
    """A docstring's lines, with its examples as literal blocks.

    An example is a paragraph of its own, indented by four blanks. What follows `Args:` and the like has no empty line
    before it.
    """
    found: list[str] = []
    above = ""  # the line with text before this one
    inside = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        if indented and not inside and number and not lines[number - 1].strip():
            if above and not above.startswith((" ", "- ", "..")):
                inside = True
                found += ["::", ""]
        elif line.strip() and not indented:
            inside = False
        found.append(line)
        above = line if line.strip() else above
    return found
