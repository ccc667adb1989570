"""The look of all figures: colours, lines that are labelled at their ends, bars with their values, title and footer.

Belongs here: how a figure looks. Not here: what it shows (`plot`, `model`). The colours are those of Okabe and Ito
(2008), which people with any colour vision can tell apart. hvdlite is always BLUE where it is compared with others. As
colours alone may not be enough, lines differ in their markers or dashes, too. Spread is drawn as bands of lines and as
whiskers of bars. There is no legend: a reader would have to look back and forth.

matplotlib may be missing (`available`), and is imported by functions. No figure needs a display.
"""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, SKY, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7"
DARK, GREY = "#333333", "#8C8C8C"
"""DARK is what others are compared with, GREY what is no contender: limits, and texts about the figure."""
PALETTE = (BLUE, ORANGE, GREEN, RED, SKY, PURPLE, DARK, GREY)
FONT, SMALL = 9, 7.5  # points
GAP = 1.35  # between labels, in units of their font's size
DOTS = 150  # per inch
LEAST_WIDTH = 7.5  # inches: room for a title
Band: TypeAlias = tuple[Sequence[float], Sequence[float]]
"""The lower and the upper quartile at each place of a line."""


@dataclass(frozen=True)
class Look:
    """How a line or a bar looks.

    Attributes:
        color: One of PALETTE.
        line: The dashes, as matplotlib spells them: '-', '--', ':', '-.'.
        marker: The marker of a line; empty: none.
        width: The line's width, in points.
        hatch: The pattern of a bar; empty: none.
    """

    color: str
    line: str = "-"
    marker: str = ""
    width: float = 1.6
    hatch: str = ""


HVDLITE = Look(BLUE, marker="o", width=2.4)
REFERENCE = Look(DARK, "--")


@dataclass(frozen=True)
class Line:
    """One line of a panel.

    Attributes:
        label: The text at its end.
        look: Its look.
        x: Its places.
        y: Its values.
        band: The quartiles of the values; None: there are none.
    """

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    band: Band | None = None


@dataclass(frozen=True)
class Bar:
    """One horizontal bar of a panel.

    Attributes:
        name: The text beside it.
        look: Its look.
        value: Its length; None: there is no bar.
        text: The text at its end.
        ends: The quartiles of the value; None: there are none.
    """

    name: str
    look: Look
    value: float | None
    text: str
    ends: tuple[float, float] | None = None


def available() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def canvas(
    columns: int, rows: int = 1, size: tuple[float, float] = (5.6, 3.9), share: str = ""
) -> tuple[Figure, list[Axes]]:
    """Make a figure and its panels, row by row.

    Args:
        columns: Panels side by side.
        rows: Rows of panels.
        size: The width and height of a panel, in inches.
        share: The axes that all panels have in common: "x", "y", "xy" or none.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(max(LEAST_WIDTH, columns * size[0]), rows * size[1] + 0.7), dpi=DOTS, layout=layout)
    panels = list(figure.subplots(rows, columns, squeeze=False, sharex="x" in share, sharey="y" in share).flat)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["bottom", "left"]].set_color(GREY)
        axes.grid(color=GREY, alpha=0.3, lw=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=FONT, labelcolor=DARK, color=GREY)
    return figure, panels


def describe(axes: Axes, title: str = "", x: str = "", y: str = "") -> None:
    """Write a panel's title, and what its axes show."""
    axes.set_title(title, loc="left", fontsize=FONT + 1, color=DARK)
    axes.set_xlabel(x, fontsize=FONT, color=DARK)
    axes.set_ylabel(y, fontsize=FONT, color=DARK)


def save(figure: Figure, path: str, title: str, *notes: str) -> None:
    """Write the figure as PNG.

    Args:
        figure: The figure.
        path: The file.
        title: What the figure shows, in words that need no explanation.
        notes: Texts below the panels, small and grey: how to read the figure, versions and machine. Long ones are
            wrapped.
    """
    most = int(figure.get_figwidth() * 72 / (0.52 * SMALL))  # letters; they are half as wide as high
    lines = [line for note in notes for line in textwrap.wrap(note, most)]
    figure.suptitle(title, x=0.01, ha="left", fontsize=FONT + 4, fontweight="bold")
    figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=SMALL, color=GREY)
    figure.savefig(path)


def draw_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Draw lines with their bands. The labels follow by `label_ends`, once the panel has its limits."""
    for line in lines:
        look = line.look
        every = max(1, len(line.x) // 8)
        axes.plot(line.x, line.y, look.line, color=look.color, lw=look.width, marker=look.marker or None, ms=4,
                  markevery=every)  # fmt: skip
        if line.band:
            axes.fill_between(line.x, *line.band, color=look.color, alpha=0.15, lw=0)


def label_ends(figure: Figure, axes: Axes, lines: Sequence[Line]) -> None:
    """Write each line's label to the right of the panel, with a thin line to its end. No label covers another one."""
    figure.draw_without_rendering()  # now the panel has its size and limits
    height = axes.get_window_extent().height
    to_axes = (axes.transData + axes.transAxes.inverted()).transform
    ends = [float(to_axes((line.x[-1], line.y[-1]))[1]) for line in lines]
    places = apart(ends, GAP * FONT * figure.dpi / 72 / height, 0.0, 1.0)
    for line, place in zip(lines, places, strict=True):
        axes.annotate(
            line.label, (line.x[-1], line.y[-1]), (1.02, place), textcoords="axes fraction", va="center", fontsize=FONT,
            color=line.look.color, annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": line.look.color, "lw": 0.7, "ls": ":", "shrinkA": 1, "shrinkB": 1,
                        "relpos": (0, 0.5)},
        )  # fmt: skip


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move places as little as possible (in squares), so that all are at least a gap apart, and in their order.

    Without limits that is an isotonic regression: places that would be too close form groups around their means.

    Args:
        wanted: The places.
        gap: The least distance. It shrinks if there is no room for all.
        low: The lowest place.
        high: The highest place.
    """
    if not wanted:
        return []
    gap = min(gap, (high - low) / max(1, len(wanted) - 1))
    order = np.argsort(wanted, kind="stable")
    groups: list[tuple[float, int]] = []  # the mean of places without their gaps, and how many
    for place, index in enumerate(order):
        mean, count = wanted[index] - gap * place, 1
        while groups and groups[-1][0] >= mean:
            before, many = groups.pop()
            mean, count = (before * many + mean * count) / (many + count), count + many
        groups.append((mean, count))
    flat = np.repeat([mean for mean, _ in groups], [count for _, count in groups])
    found = np.empty(len(wanted))
    found[order] = np.clip(flat, low, high - gap * (len(wanted) - 1)) + gap * np.arange(len(wanted))
    return [float(place) for place in found]


def draw_bars(axes: Axes, bars: Sequence[Bar]) -> None:
    """Draw horizontal bars from top to bottom, with their names, values and whiskers. The scale begins at 0."""
    for place, bar in enumerate(bars):
        end = bar.value or 0.0
        axes.barh(place, end, 0.72, color=bar.look.color, hatch=bar.look.hatch, edgecolor="white", lw=0)
        if bar.ends:
            axes.plot(bar.ends, (place, place), color=DARK, lw=1.1, marker="|", ms=5, mew=1.1)
        axes.annotate(bar.text, (max(end, *(bar.ends or ()), 0.0), place), (4, 0), textcoords="offset points",
                      va="center", fontsize=FONT, color=DARK,
                      bbox={"fc": "white", "ec": "none", "pad": 0.8, "alpha": 0.8})  # fmt: skip
    axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.margins(x=0.12)  # for the values


def in_seconds(axes: Axes, which: str) -> None:
    """Write the ticks of an axis in seconds with their prefixes: '10 µs', '1 ms', '2 s'. which: "x" or "y"."""
    from matplotlib.ticker import EngFormatter

    (axes.xaxis if which == "x" else axes.yaxis).set_major_formatter(EngFormatter("s"))


def in_numbers(axes: Axes) -> None:
    """Write the ticks of a logarithmic y axis as plain numbers: 0.1, 0.2, 0.5, 1."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
