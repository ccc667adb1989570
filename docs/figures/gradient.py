"""The pictures of a gradient's way: `python -m docs.figures.gradient`.

`docs/about/walk.png` shows the order of events on one host and on several. `docs/about/memory.png` shows who adds which
part of the buckets.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from hvdlite.bench import style

FOLDER = Path(__file__).resolve().parents[1] / "about"
PALE = {style.BLUE: "#CFE3F1", style.ORANGE: "#F8E3B8", style.GREEN: "#C5E6DB", style.GREY: "#E6E6E6"}


def box(axes: Axes, place: tuple[float, float], size: tuple[float, float], text: str, color: str) -> None:
    """Draw a box with a text in its middle. place: its left and its lower border."""
    axes.add_patch(Rectangle(place, *size, fc=PALE[color], ec=color, lw=1))
    middle = (place[0] + size[0] / 2, place[1] + size[1] / 2)
    axes.annotate(text, middle, ha="center", va="center", fontsize=style.SMALL, color=style.DARK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str, both: bool = False) -> None:
    """Draw an arrow. both: with a head at each end."""
    heads = {"arrowstyle": "<|-|>" if both else "-|>", "color": color, "lw": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", end, start, arrowprops=heads)


def walk(path: str) -> None:
    """Draw one training step of two ranks against time: on one host, and on two."""
    figure, (one, two) = style.canvas(1, 2, size=(7.5, 1.9))
    rows = ("rank 0", "rank 1")
    for row, name in enumerate(rows):
        y = 1.6 - 1.3 * row
        for axes in (one, two):
            axes.annotate(name, (-0.1, y + 0.3), ha="right", va="center", fontsize=style.FONT, color=style.DARK)
        late = 0.4 * row  # rank 1 computes a little longer
        box(one, (0, y), (4.0 + late, 0.6), "backward: gradients, last layer first", style.BLUE)
        box(one, (4.05 + late, y), (0.95, 0.6), "copy into\nbuckets", style.BLUE)
        box(one, (5.05 + late, y), (0.95 - late, 0.6), "agree", style.ORANGE)
        box(one, (6.05, y), (1.5, 0.6), f"add part {row} of\nboth ranks' buckets", style.GREEN)
        box(one, (7.6, y), (0.9, 0.6), "step()", style.BLUE)
        box(two, (0, y + 0.2), (4.6 + late, 0.5), "backward: gradients, last layer first", style.BLUE)
        box(two, (7.1, y + 0.2), (0.9, 0.5), "step()", style.BLUE)
        for number, (start, length) in enumerate(((1.5, 0.9), (2.75, 1.1), (4.1, 1.1), (5.45, 1.3))):
            box(two, (start, y - 0.3), (0.3, 0.42), "", style.ORANGE)
            box(two, (start + 0.3, y - 0.3), (length, 0.42), f"bucket {number}", style.GREEN)
    for axes, title in (
        (one, "One host: all buckets are added when backward() ends"),
        (two, "Several hosts: buckets travel while backward() computes, if that is faster"),
    ):
        style.describe(axes, title)
        axes.set(xlim=(-0.8, 8.6), ylim=(-0.15, 2.5))
        axes.set_axis_off()
    note = (
        "Time goes from left to right; lengths are not to scale. Blue: computing. Orange: the ranks agree that all "
        "mean the same operation, so a rank waits here for slower ranks. Green: the reduction."
    )
    style.save(figure, path, "One training step of two ranks", note)


def memory(path: str) -> None:
    """Draw the buckets of four ranks on two hosts, and who adds which part."""
    figure, (axes,) = style.canvas(1, size=(7.5, 2.7))
    for host in range(2):
        left = 5.8 * host
        axes.add_patch(Rectangle((left - 0.85, -0.25), 4.3, 2.75, fc="none", ec=style.GREY, lw=1, ls="--"))
        axes.annotate(f"host {'AB'[host]}: memory that its ranks share", (left - 0.75, 2.28), va="center",
                      fontsize=style.FONT, color=style.GREY)  # fmt: skip
        for row in range(2):
            y = 1.2 - 1.2 * row
            axes.annotate(f"rank {2 * host + row}", (left - 0.1, y + 0.35), ha="right", va="center",
                          fontsize=style.FONT, color=style.DARK)  # fmt: skip
            for part in range(2):
                name = f"part {part}" + (f"\nrank {2 * host + row} adds" if part == row else "")
                color = style.GREEN if part == row else style.GREY
                box(axes, (left + 1.6 * part, y), (1.55, 0.7), name, color)
        arrow(axes, (left + 0.77, 0.72), (left + 0.77, 1.18), style.GREEN, both=True)
        arrow(axes, (left + 2.37, 0.72), (left + 2.37, 1.18), style.GREEN, both=True)
    arrow(axes, (1.57, 1.78), (5.78, 1.78), style.RED, both=True)
    arrow(axes, (3.17, 0.12), (7.38, 0.12), style.RED, both=True)
    axes.annotate("network: part 0", (4.2, 1.88), ha="center", fontsize=style.SMALL, color=style.RED)
    axes.annotate("network: part 1", (4.2, -0.06), ha="center", fontsize=style.SMALL, color=style.RED)
    axes.set(xlim=(-1.0, 9.4), ylim=(-0.35, 2.6))
    axes.set_axis_off()
    note = (
        "Each rank adds its part of its host's buckets where they lie (green). It all-reduces that part with its "
        "counterpart on the other host (red), and writes the result to all buckets of its host. One host needs no red."
    )
    style.save(figure, path, "Buckets of gradients, on two hosts with two ranks each", note)


if __name__ == "__main__":
    walk(str(FOLDER / "walk.png"))
    memory(str(FOLDER / "memory.png"))
