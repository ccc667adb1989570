"""Pictures of the results. They need matplotlib, which may be missing."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from hvdlite.bench.allreduce import Sweep, one_line, readable

if TYPE_CHECKING:  # `step` imports torch, which may be missing
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from hvdlite.bench.compression import Row
    from hvdlite.bench.step import Result
    from hvdlite.bench.strategies import Row as StrategyRow

OURS = ("arena", "tensor", "ring", "halving_doubling", "auto")


def available() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def canvas(columns: int) -> tuple[Figure, Sequence[Axes]]:
    """Make a figure of `columns` plots side by side. It needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(7 * columns, 5.5), layout="constrained", squeeze=False)
    return figure, axes[0]


def save(figure: Figure, path: str, title: str, caption: str) -> None:
    """Write the picture, with a title and a caption above it. The caption's lines are no wider than the picture."""
    lines = textwrap.wrap(caption, int(14 * figure.get_figwidth()))
    figure.suptitle("\n".join([title, *lines]), fontsize=9)
    figure.savefig(path, dpi=120)


def plot_sweep(path: str, sweep: Sweep, caption: str) -> None:
    """Plot time and bandwidth against size, on logarithmic axes. hvdlite has full lines, other contenders dashed ones.

    Args:
        path: The PNG file to write.
        sweep: The results.
        caption: Text about the machine.
    """
    figure, (times, bandwidths) = canvas(2)
    for key, title in sweep.titles.items():
        rows = [row for row in sweep.rows if key in row.seconds]
        label, line = one_line(title), "-" if key in OURS else "--"
        nbytes = [row.nbytes for row in rows]
        times.plot(nbytes, [row.seconds[key] * 1e6 for row in rows], line, marker="o", ms=3, label=label)
        bandwidths.plot(nbytes, [row.algbw(key) for row in rows], line, marker="o", ms=3, label=label)
    for axis, what in ((times, "time in us"), (bandwidths, "algbw in GB/s")):
        axis.set(xscale="log", yscale="log", xlabel="size", ylabel=what)
        ticks = [row.nbytes for row in sweep.rows][:: max(len(sweep.rows) // 8, 1)]
        axis.set_xticks(ticks, [readable(tick) for tick in ticks], rotation=30)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.legend()
    save(figure, path, "All-reduce, float32, in place", caption)


def plot_steps(path: str, results: Sequence[Result], caption: str) -> None:
    """Plot milliseconds per step as bars, for each model and copy.

    Args:
        path: The PNG file to write.
        results: The results of `step`, or that of `fsdp`.
        caption: Text about the machine.
    """
    figure, (axis,) = canvas(1)
    labels = {"whole": "whole model", "none": "no communication", "hvdlite": "hvdlite",
              "ddp_views": "DDP hvdlite, views", "ddp_copies": "DDP hvdlite", "ddp": "DDP gloo",
              "gloo": "gloo"}  # fmt: skip
    keys = [key for key in labels if key in results[0].seconds]
    for offset, key in enumerate(keys):
        places = [index + 0.17 * (offset - (len(keys) - 1) / 2) for index in range(len(results))]
        bars = axis.bar(places, [r.seconds[key] * 1e3 for r in results], 0.16, label=labels[key])
        axis.bar_label(bars, fmt="%.1f", fontsize=8)
    axis.set_xticks(range(len(results)), [r.name for r in results])
    axis.set_ylabel("ms per step")
    axis.legend()
    save(figure, path, "Training step", caption)


def plot_compression(path: str, rows: Sequence[Row], caption: str) -> None:
    """Plot for each problem the held-out loss against time on the slowest network, and the speedup on each network.

    Args:
        path: The PNG file to write.
        rows: The results of `compression`.
        caption: Text about the machine.
    """
    from hvdlite.bench.compression import COMPRESSORS, PLAIN

    plain = {row.problem: row for row in rows if row.compressor == PLAIN}
    figure, axes = canvas(2 * len(plain))
    for (problem, base), curves, bars in zip(plain.items(), axes[::2], axes[1::2], strict=True):
        slowest = max(base.speeds, key=lambda link: base.speeds[link].seconds)
        mine = [row for row in rows if row.problem == problem]
        for row in mine:
            if slowest in row.speeds:
                seconds = [step * row.speeds[slowest].seconds for step in row.curves[0].steps]
                losses = [fmean(each) for each in zip(*(curve.losses for curve in row.curves), strict=True)]
                curves.plot(seconds, losses, "-" if row is not base else "k--", label=COMPRESSORS[row.compressor][0])
        curves.set(
            xscale="log",
            xlabel="seconds: steps * time of a step",
            ylabel="held-out loss",
            title=f"{problem}, {slowest}",
        )
        curves.grid(alpha=0.3)
        curves.legend()
        for offset, link in enumerate(base.speeds):
            places = [index + 0.8 / len(base.speeds) * offset for index in range(len(mine))]
            found = [faster(row, base, link) for row in mine]
            drawn = bars.bar(places, found, 0.75 / len(base.speeds), label=link)
            bars.bar_label(drawn, [f"{value:.1f}" if value else "-" for value in found], fontsize=7)
        names = [COMPRESSORS[row.compressor][0] for row in mine]
        bars.set_xticks(range(len(mine)), names, rotation=30, ha="right", rotation_mode="anchor")
        bars.set(ylabel="times as fast to the target", title=problem)
        bars.legend()
    save(figure, path, "Compression of gradients", caption)


def faster(row: Row, plain: Row, link: str) -> float:
    """The seconds to the target without compression / those of one compressor; 0 if a seed does not reach it."""
    base = plain.seconds_to_target(plain, link)
    mine = row.seconds_to_target(plain, link) if link in row.speeds else None
    return base / mine if base and mine else 0.0


def plot_strategies(path: str, rows: Sequence[StrategyRow], caption: str) -> None:
    """Plot the held-out loss against time: a panel for each condition, and a line for each strategy.

    Args:
        path: The PNG file to write.
        rows: The results of `strategies`.
        caption: Text about the machine.
    """
    from hvdlite.bench.strategies import TARGET, conditions

    found = conditions(rows)
    figure, axes = canvas(len(found))
    for axis, (condition, (plain, its)) in zip(axes, found.items(), strict=True):
        for row in its:
            axis.plot(row.seconds, row.losses, "k--" if row is plain else "-", label=row.title)
        axis.axhline(plain.target, color="gray", lw=0.8, ls=":", label=f"synchronous after {TARGET:.0%} of its time")
        axis.set(xlabel="seconds", ylabel="held-out loss of the average model", yscale="log", title=condition)
        axis.grid(alpha=0.3)
        axis.legend()
    save(figure, path, "Strategies: which to use when", caption)
