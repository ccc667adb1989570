"""Makes docs/diagnose/timeline.png from two real traces: `.venv/bin/python docs/figures/timeline.py`.

The script runs `steps.py` on 2 ranks, with buckets that leave at the end of backward and with buckets that leave during
it. Of each trace it draws the three steps that other programs have disturbed least. The rows and
bars are those that Perfetto shows. What rank 0 computes is no part of a trace: it fills the gaps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes

from hvdlite.bench import style

HERE = Path(__file__).resolve().parent
COLORS = {"NEGOTIATE_ALLREDUCE": style.ORANGE, "ALLREDUCE": style.BLUE}
STEPS = 3
LONG = 8.0  # milliseconds that a wait takes if the other rank is late
PANELS = {
    "0": "HVDLITE_OVERLAP=0: all buckets leave at the end of backward. All of their time is exposed.",
    "1": "HVDLITE_OVERLAP=1: buckets leave during backward. Only the last ones are exposed.",
}
NOTES = (
    "Orange: NEGOTIATE_ALLREDUCE, rank 0 waits for rank 1 to call. Blue: ALLREDUCE, the sum itself.",
    "In the gaps rank 0 computes. Two ranks on two cores that other programs use, too; HVDLITE_BUCKET_MB=4; "
    "a perceptron of 6 layers.",
)


class Bar(NamedTuple):
    """An interval of a row, in milliseconds."""

    row: str
    name: str
    start: float
    stop: float


def recorded(overlap: str) -> list[Bar]:
    """The bars of the quickest steps of a new trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        settings = {"HVDLITE_OVERLAP": overlap, "HVDLITE_BUCKET_MB": "4", "HVDLITE_TIMELINE": "DYNAMIC"}
        launch = [str(Path(sys.executable).with_name("hvdliterun")), "-np", "2", sys.executable]
        subprocess.run([*launch, str(HERE / "steps.py"), str(trace)], check=True, env={**os.environ, **settings})
        found = bars(json.loads(trace.read_text()))
    found = [bar for bar in found if bar.row.startswith("gradients")]  # the others compare weights
    many = 2 * STEPS * len({bar.row for bar in found})  # each operation has two bars
    parts = [found[first : first + many] for first in range(0, len(found), many)]
    return min(parts, key=disturbance)


def disturbance(part: list[Bar]) -> float:
    """The time of three steps, and the waits in those in which rank 1 is not late."""
    waits = [bar for bar in part[: len(part) * 2 // 3] if bar.name != "ALLREDUCE"]
    return max(bar.stop for bar in part) - part[0].start + sum(bar.stop - bar.start for bar in waits)


def bars(events: list[dict[str, Any]]) -> list[Bar]:
    """The intervals of a trace, in the order of their beginnings."""
    rows: dict[int, str] = {}
    begun: dict[int, list[dict[str, Any]]] = {}
    found = []
    for event in events:
        process = event["pid"]
        if event.get("name") == "process_name":
            rows[process] = event["args"].get("name", "")
        elif event["ph"] == "B":
            begun.setdefault(process, []).append(event)
        elif event["ph"] == "E":
            first = begun[process].pop()
            found.append(Bar(rows[process], first["name"], first["ts"] / 1000, event["ts"] / 1000))
    return sorted(found, key=lambda bar: bar.start)


def draw(axes: Axes, title: str, found: list[Bar]) -> None:
    """Draw a row for each tensor, from top to bottom."""
    rows = sorted({bar.row for bar in found})
    first = found[0].start
    for bar in found:
        axes.barh(rows.index(bar.row), bar.stop - bar.start, 0.7, bar.start - first, color=COLORS[bar.name])
        if bar.name != "ALLREDUCE" and bar.stop - bar.start > LONG and bar.row == rows[0]:
            axes.annotate("rank 1 is late", (bar.start - first + 0.4, 0), va="center", fontsize=style.SMALL)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.grid(False, axis="y")
    style.describe(axes, title)


def main() -> None:
    """Record both traces, and draw them."""
    figure, panels = style.canvas(1, 2, (9.5, 2.2), share="x")
    for axes, (overlap, title) in zip(panels, PANELS.items(), strict=True):
        draw(axes, title, recorded(overlap))
    panels[-1].set_xlabel("milliseconds", fontsize=style.FONT, color=style.DARK)
    style.save(
        figure,
        str(HERE.parent / "diagnose" / "timeline.png"),
        "Timelines of three training steps: rank 1 is late in the third one",
        *NOTES,
    )


if __name__ == "__main__":
    main()
