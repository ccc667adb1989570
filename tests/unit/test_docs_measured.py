"""The tables of the how-to pages have the numbers of MEASURED.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMPRESSORS = {
    "none": "none", "bf16": "`bf16`", "int8": "`int8()`", "int8, 4 bits": "`int8(bits=4)`", "1 bit": "`onebit()`",
    "Top-K 1 %": "`topk(ratio=0.01)`", "Top-K 1 %, momentum": "`topk(ratio=0.01, momentum=0.9)`",
    "random-K 1 %": "`randomk(ratio=0.01)`", "PowerSGD, rank 2": "`powersgd(rank=2)`",
    "PowerSGD, rank 4": "`powersgd(rank=4)`", "auto": '`"auto"`',
}  # fmt: skip


def test_compressors() -> None:
    measured = (ROOT / "hvdlite/bench/MEASURED.md").read_text()
    page = (ROOT / "docs/howto/compression.md").read_text()
    for name, title in COMPRESSORS.items():
        rows = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", measured, re.MULTILINE)
        assert len(rows) == 2, name  # a transformer and a CNN
        for row in rows:
            size, accuracy, _, _, unlimited, _, fast, _, slow = (each.strip() for each in row.split("|"))
            percent, _, points = accuracy.rstrip(")").partition(" (")
            shown = f"{percent} %" if name == "none" else points
            line = f"| {title} | {float(size):.0f} | {shown} | {unlimited} | {fast} | {slow} |\n"
            assert line in page, line


def test_memory() -> None:
    """Memory of sharded optimizers, without the last column."""
    page = (ROOT / "docs/howto/sharding.md").read_text()
    table = (ROOT / "hvdlite/bench/MEASURED.md").read_text().partition("| | state | memory after a step | peak |")[2]
    rows = [row for row in table.partition("\n\n")[0].splitlines()[2:] if row]
    assert len(rows) == 6
    for row in rows:
        numbers = [each.strip() for each in row.strip("|").split("|")[1:4]]
        assert f"| {' | '.join(numbers)} |" in page, row
