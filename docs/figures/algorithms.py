"""The picture of the all-reduce algorithms, step by step: `python -m docs.figures.algorithms`.

The script follows each algorithm among four ranks. It draws the ranks' arrays before each step, with the step's
messages, and after the last step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from hvdlite.bench import style

PATH = Path(__file__).resolve().parents[1] / "about" / "algorithms.png"
RANKS = PARTS = 4
SHADES = {1: "#E8F1F8", 2: "#A9CDE6", 3: "#5FA3D0", 4: style.BLUE}
"""The colour of a part, by the number of ranks whose numbers it holds."""
Array: TypeAlias = list[list[frozenset[int]]]
"""For each rank and part, the ranks whose numbers have been added."""


@dataclass(frozen=True)
class Send:
    """One message of one part. copy: the receiver's part is replaced, and not added."""

    source: int
    dest: int
    part: int
    copy: bool = False


@dataclass(frozen=True)
class Step:
    """Messages at the same time. color: that of their arrows; what: the text below the step."""

    sends: list[Send]
    color: str = style.RED
    what: str = ""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm among four ranks. hosts: how many hosts they are on."""

    title: str
    steps: list[Step] = field(default_factory=list)
    hosts: int = 1


def after(arrays: Array, step: Step) -> Array:
    """The arrays after a step. All messages carry what their senders had before it."""
    found = [list(parts) for parts in arrays]
    for send in step.sends:
        arrived = arrays[send.source][send.part]
        found[send.dest][send.part] = arrived if send.copy else found[send.dest][send.part] | arrived
    return found


def ring() -> Algorithm:
    adds = [Step([Send(r, (r + 1) % RANKS, (r - s) % PARTS) for r in range(RANKS)], what="add") for s in range(3)]
    copies = [
        Step([Send(r, (r + 1) % RANKS, (r - s + 1) % PARTS, copy=True) for r in range(RANKS)], what="copy")
        for s in range(3)
    ]
    return Algorithm("Ring: 2(p-1) steps, each with 1/p of the array", adds + copies)


def halving_doubling() -> Algorithm:
    halves, quarters = (range(2), range(2, 4)), (range(0, 4, 2), range(1, 4, 2))
    first = [Send(r, r ^ 1, part) for r in range(RANKS) for part in halves[1 - r % 2]]
    second = [Send(r, r ^ 2, part) for r in range(RANKS) for part in halves[r % 2] if part in quarters[1 - r // 2]]
    back = [Send(s.dest, s.source, s.part, copy=True) for s in second]
    last = [Send(s.dest, s.source, s.part, copy=True) for s in first]
    texts = ("add halves", "add quarters", "copy quarters", "copy halves")
    steps = [Step(sends, what=what) for sends, what in zip((first, second, back, last), texts, strict=True)]
    return Algorithm("Halving-doubling: 2 log2(p) steps, as many bytes as the ring", steps)


def doubling() -> Algorithm:
    steps = [
        Step([Send(r, r ^ distance, part) for r in range(RANKS) for part in range(PARTS)], what="add everything")
        for distance in (1, 2)
    ]
    return Algorithm("Doubling: log2(p) steps, each with the whole array", steps)


def two_shot() -> Algorithm:
    reads = [Send(r, owner, owner) for owner in range(PARTS) for r in range(RANKS) if r != owner]
    writes = [Send(owner, r, owner, copy=True) for owner in range(PARTS) for r in range(RANKS) if r != owner]
    steps = [Step(reads, style.GREEN, "read and add"), Step(writes, style.GREEN, "write")]
    return Algorithm("Two-shot in shared memory: no messages; rank r adds part r of all arrays", steps)


def hierarchical() -> Algorithm:
    mine = {0: (0, 1), 1: (2, 3), 2: (0, 1), 3: (2, 3)}  # the parts that each rank adds up within its host
    reads = [Send(r ^ 1, r, part) for r in range(RANKS) for part in mine[r]]
    across = [Send(r, r ^ 2, part) for r in range(RANKS) for part in mine[r]]
    writes = [Send(r, r ^ 1, part, copy=True) for r in range(RANKS) for part in mine[r]]
    steps = [
        Step(reads, style.GREEN, "read and add"),
        Step(across, what="all-reduce"),
        Step(writes, style.GREEN, "write"),
    ]
    return Algorithm("Hierarchical: shared memory on each of two hosts, the network between them", steps, hosts=2)


ALGORITHMS: tuple[Callable[[], Algorithm], ...] = (ring, halving_doubling, doubling, two_shot, hierarchical)
GAP = 5.6  # between the pictures of two steps, in widths of a rank's array


def draw(path: str) -> None:
    """Draw all algorithms, one below the other."""
    figure, panels = style.canvas(1, len(ALGORITHMS), size=(7.5, 1.32))
    for axes, make in zip(panels, ALGORITHMS, strict=True):
        algorithm = make()
        arrays: Array = [[frozenset([rank])] * PARTS for rank in range(RANKS)]
        for number, step in enumerate([*algorithm.steps, Step([])]):
            draw_arrays(axes, number * GAP, arrays, algorithm.hosts)
            draw_sends(axes, number * GAP, step, algorithm.hosts)
            arrays = after(arrays, step)
        assert all(len(part) == RANKS for parts in arrays for part in parts), (
            f"{algorithm.title}: sums are not complete"
        )
        axes.set(xlim=(-0.6, 7 * GAP - 1.4), ylim=(PARTS + 0.55, -1.05), aspect="equal")
        axes.set_axis_off()
        style.describe(axes, algorithm.title)
    note = (
        "Columns: the arrays of ranks 0 to 3, each in four parts. Numbers: how many ranks' values a part holds. "
        "Arrows: red, a message to another rank; green, memory that a host's ranks share. Each picture shows the "
        "arrays before a step. In the last one all parts hold the sum of four."
    )
    style.save(figure, path, "One all-reduce among four ranks, step by step", note)


def draw_arrays(axes: Axes, left: float, arrays: Array, hosts: int) -> None:
    """Draw the parts of all ranks, and the ranks' numbers above."""
    for rank, parts in enumerate(arrays):
        x = place(rank, left, hosts)
        axes.annotate(f"{rank}", (x, -0.75), ha="center", va="center", fontsize=style.SMALL, color=style.GREY)
        for part, holds in enumerate(parts):
            shade = SHADES[len(holds)]
            axes.add_patch(Rectangle((x - 0.42, part - 0.42), 0.84, 0.84, fc=shade, ec="white"))
            ink = "white" if len(holds) > 2 else style.DARK
            axes.annotate(f"{len(holds)}", (x, part), ha="center", va="center", fontsize=6.5, color=ink)


def place(rank: int, left: float, hosts: int) -> float:
    """The middle of a rank's column. Between two hosts there is a gap."""
    return left + 1.15 * rank + (0.35 if hosts > 1 and rank >= RANKS // 2 else 0.0)


def draw_sends(axes: Axes, left: float, step: Step, hosts: int) -> None:
    """Draw an arrow for each message, in the row of its part, and the step's text below."""
    for send in step.sends:
        start, end = place(send.source, left, hosts), place(send.dest, left, hosts)
        near = 0.33 if end > start else -0.33
        low = 0.2 if end > start else -0.2  # arrows in both directions do not cover each other
        axes.annotate(
            "", (end - near, send.part + low), (start + near * 0.6, send.part + low),
            arrowprops={"arrowstyle": "-|>", "color": step.color, "lw": 0.8, "shrinkA": 0, "shrinkB": 0,
                        "mutation_scale": 5},
        )  # fmt: skip
    if step.what:
        middle = left + 1.15 * (RANKS - 1) / 2
        axes.annotate(
            step.what, (middle, PARTS + 0.1), ha="center", va="center", fontsize=style.SMALL, color=style.DARK
        )


if __name__ == "__main__":
    draw(str(PATH))
