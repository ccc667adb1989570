"""The picture of the two main measurements: `python -m docs.figures.benchmark`.

The numbers are those of the tables on `docs/about/benchmarks.md`. `docs/about/benchmark.json` has them.
"""

from __future__ import annotations

import json
from pathlib import Path

from hvdlite.bench import style
from hvdlite.bench.plot import CONTENDERS

FOLDER = Path(__file__).resolve().parents[1] / "about"
RESULTS = FOLDER / "benchmark.json"
DDP = style.Look(style.ORANGE)


def draw(path: str) -> None:
    """Draw the time of an all-reduce, and the price of distribution per training step."""
    found = json.loads(RESULTS.read_text())
    figure, (times, prices) = style.canvas(2, size=(3.75, 2.7))
    sizes = found["allreduce"]["nbytes"]
    lines = [style.Line(*CONTENDERS[key], sizes, its) for key, its in found["allreduce"]["seconds"].items()]
    style.draw_lines(times, lines)
    times.set(xscale="log", yscale="log")
    times.set_xticks(sizes, [f"{size >> 20}" for size in sizes])
    times.minorticks_off()
    style.in_seconds(times, "y")
    style.describe(times, "All-reduce, by size in MiB")
    bars = [style.Bar("DDP on gloo", DDP, 100.0, "100 %")]
    step = found["step"]
    for name, least, middle, most in zip(step["models"], step["least"], step["median"], step["most"], strict=True):
        short = name.split(",")[0]
        bars.append(style.Bar(f"hvdlite, {short}", style.HVDLITE, 100 * middle, f"{middle:.0%}".replace("%", " %"),
                              (100 * least, 100 * most)))  # fmt: skip
    style.draw_bars(prices, bars)
    style.describe(prices, "Extra time per training step", "% of that with DDP on gloo")
    style.label_ends(figure, times, lines)
    note = (
        f"Medians of {found['allreduce']['runs']} runs (left) and {step['runs']} runs (right; whiskers: lowest and "
        f"highest). {found['machine']}."
    )
    style.save(figure, path, "hvdlite on one host (lower is better)", note)


if __name__ == "__main__":
    draw(str(FOLDER / "benchmark.png"))
