"""The figures of the results, one function for each. `style` says how they look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from hvdlite.bench.allreduce import Sweep, readable
from hvdlite.bench.style import (
    BLUE,
    DARK,
    FONT,
    GREEN,
    GREY,
    HVDLITE,
    ORANGE,
    PURPLE,
    RED,
    REFERENCE,
    SKY,
    Bar,
    Line,
    Look,
    canvas,
    describe,
    draw_bars,
    draw_lines,
    in_numbers,
    in_seconds,
    label_ends,
    save,
)
from hvdlite.bench.timing import Quartiles

if TYPE_CHECKING:  # these import torch, which may be missing
    from hvdlite.bench.collectives import Price
    from hvdlite.bench.compression import Row
    from hvdlite.bench.memory import Result as MemoryResult
    from hvdlite.bench.overlap import Result as OverlapResult
    from hvdlite.bench.strategies import Row as StrategyRow

OTHER, THIRD = Look(RED, marker="s"), Look(ORANGE, marker="D")
LIMIT = Look(GREY, ":")
CONTENDERS: Mapping[str, tuple[str, Look]] = {
    "arena": ("hvdlite, gradients", HVDLITE),
    "auto": ("hvdlite, allreduce_", Look(BLUE, "--", "s")),
    "tensor": ("hvdlite, common memory", Look(BLUE, ":", "^", 1.2)),
    "ring": ("hvdlite, ring", Look(BLUE, "-.", "v", 1.2)),
    "halving_doubling": ("hvdlite, halving-doubling", Look(BLUE, "-", "x", 0.9)),
    "neighbors": ("hvdlite, mean of neighbours", Look(BLUE, marker="P", width=1.2)),
    "mpi": ("MPI_Allreduce", OTHER),
    "mpi_huge": ("MPI_Allreduce, huge pages", Look(RED, "--", "^", 1.2)),
    "gloo": ("gloo", THIRD),
    "memcpy": ("only copying the bytes", LIMIT),
    "link": ("only sending the bytes", Look(GREY, "-.")),
    "ipc": ("hvdlite, CUDA IPC", HVDLITE),
    "ring_whole": ("hvdlite, ring in one piece", Look(BLUE, ":", "^", 1.2)),
    "staged": ("hvdlite, ring by the host", Look(BLUE, "--", "D", 0.9)),
    "mpi_host": ("MPI_Allreduce, host memory", Look(RED, "--", "^", 1.2)),
    "copy": ("only copying on the GPU", LIMIT),
}
"""The label and the look of the all-reduce's contenders."""
USUAL = ("arena", "auto", "mpi", "gloo", "memcpy", "link", "ipc", "copy")
"""The contenders that a user would choose between, and the limits."""
COPIES: Mapping[str, tuple[str, Look]] = {
    "whole": ("not sharded", Look(GREY)),
    "none": ("no communication", Look(GREY)),
    "hvdlite": ("hvdlite", HVDLITE),
    "ddp_views": ("DDP over hvdlite, with views", Look(SKY)),
    "ddp_copies": ("DDP over hvdlite", Look(SKY, hatch="///")),
    "ddp": ("DDP over gloo", Look(ORANGE)),
    "gloo": ("gloo", Look(ORANGE)),
}
"""The name and the look of the training step's copies."""
TRAINED: Mapping[str, Look] = {
    "unsharded": HVDLITE, "sharded": HVDLITE, "gradients": HVDLITE, "ddp": Look(ORANGE), "zero": Look(RED),
    "fsdp": Look(PURPLE),
}  # fmt: skip
"""The looks of the memory benchmark's contenders."""
COMPRESSED: Mapping[str, Look] = {
    "none": REFERENCE, "fp16": Look(SKY, "-", "o"), "bf16": Look(SKY, "--", "s"), "int8": Look(ORANGE, "-", "o"),
    "int4": Look(ORANGE, "--", "s"), "onebit": Look(ORANGE, ":", "^"), "topk": Look(GREEN, "-", "o"),
    "dgc": Look(GREEN, "--", "s"), "randomk": Look(GREEN, ":", "^"), "powersgd": Look(PURPLE, "-", "o"),
    "powersgd4": Look(PURPLE, "--", "s"), "auto": HVDLITE,
}  # fmt: skip
"""The looks of compressors: a colour for each family."""
KEPT_TOGETHER: Mapping[str, Look] = {
    "synchronous": REFERENCE, "local": Look(ORANGE, marker="o"), "diloco": Look(RED, marker="s"),
    "ring": Look(GREEN, marker="^"), "one_peer": Look(SKY, marker="v"), "age": Look(PURPLE, marker="D"),
}  # fmt: skip
"""The looks of strategies. All are hvdlite's, so none has its colour."""


class Steps(Protocol):
    """The times of training steps, as `step`, `fsdp` and `keras_step` measure them."""

    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> dict[str, float]: ...
    @property
    def spread(self) -> dict[str, Quartiles]: ...


def plot_sweep(path: str, sweep: Sweep, machine: str) -> None:
    """Plot the time of an all-reduce against the size: the ways that users have, and details in a panel of their own.

    Args:
        path: The PNG file to write.
        sweep: The results.
        machine: Versions and the machine, in one line.
    """
    keys = [key for key in sweep.titles if any(key in row.seconds for row in sweep.rows)]
    details = [key for key in keys if key not in USUAL]
    parts = {"hvdlite beside others": [key for key in keys if key in USUAL],
             "Details: single algorithms, and other memory": [*keys[:1], *details] if details else []}  # fmt: skip
    parts = {title: its for title, its in parts.items() if its}
    figure, panels = canvas(len(parts), size=(6.4, 4.8), share="xy")
    ticks = [row.nbytes for row in sweep.rows][:: max(1, len(sweep.rows) // 6)]
    drawn = [[time_line(key, sweep) for key in its] for its in parts.values()]
    for axes, title, lines in zip(panels, parts, drawn, strict=True):
        draw_lines(axes, lines)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(ticks, [readable(tick) for tick in ticks])
        axes.minorticks_off()
        in_seconds(axes, "y")
        describe(axes, title, "size of each rank's array")
    for axes, lines in zip(panels, drawn, strict=True):
        label_ends(figure, axes, lines)
    title = f"Time of an all-reduce of {sweep.size} ranks (lower is better)"
    save(figure, path, title, "float32, in place. Lines: medians, bands: quartiles over all calls.", machine)


def time_line(key: str, sweep: Sweep) -> Line:
    """The times of one contender, by size."""
    rows = [row for row in sweep.rows if key in row.seconds]
    low, high = zip(*(row.spread.get(key, (row.seconds[key],) * 2) for row in rows), strict=True)
    label, look = CONTENDERS[key]
    return Line(label, look, [row.nbytes for row in rows], [row.seconds[key] for row in rows], (low, high))


def plot_steps(path: str, results: Sequence[Steps], machine: str) -> None:
    """Plot the time of training steps as bars: a panel for each model.

    Args:
        path: The PNG file to write.
        results: The results of `step`, `fsdp` or `keras_step`.
        machine: Versions and the machine, in one line.
    """
    figure, panels = canvas(len(results), size=(3.6, 0.8 + 0.36 * len(results[0].seconds)), share="xy")
    for axes, result in zip(panels, results, strict=True):
        keys = [key for key in COPIES if key in result.seconds]
        draw_bars(axes, [
            Bar(*COPIES[key], result.seconds[key] * 1e3, f"{result.seconds[key] * 1e3:.1f}",
                milliseconds(result.spread.get(key)))
            for key in keys
        ])  # fmt: skip
        axes.axvline(result.seconds["none"] * 1e3, color=DARK, lw=0.8, ls="--")
        describe(axes, result.name, "ms per step")
    note = f"{whiskers('steps')} Dashed: no communication. What is to the right of it is the price of several ranks."
    save(figure, path, "Time of a training step (lower is better)", note, machine)


def whiskers(what: str) -> str:
    """How to read bars. what: the plural of what was timed."""
    return f"Bars: medians, whiskers: quartiles over all {what}."


def milliseconds(spread: Quartiles | None) -> Quartiles | None:
    """Quartiles in milliseconds."""
    return spread and (spread[0] * 1e3, spread[1] * 1e3)


def plot_memory(path: str, found: MemoryResult, machine: str) -> None:
    """Plot the memory and the time of an optimizer's step() as bars.

    Args:
        path: The PNG file to write.
        found: The result of `memory`.
        machine: Versions and the machine, in one line.
    """
    figure, (memory, times) = canvas(2, size=(5.0, 2.9), share="y")
    draw_bars(memory, [Bar(row.title, TRAINED[key], max(row.memory) / 1e6, f"{max(row.memory) / 1e6:,.0f}")
                       for key, row in found.rows.items()])  # fmt: skip
    for place, row in enumerate(found.rows.values()):
        if max(row.peak):
            memory.plot(max(row.peak) / 1e6, place, "d", color=DARK, ms=5)
    draw_bars(times, [Bar(row.title, TRAINED[key], row.step * 1e3, f"{row.step * 1e3:.1f}",
                          milliseconds(row.spread.get("step"))) for key, row in found.rows.items()])  # fmt: skip
    describe(memory, "Memory of a rank after a step; diamonds: the peak", "MB")
    describe(times, "Time of optimizer.step()", "ms")
    title = f"Memory and time of Adam for {found.parameters / 1e6:.1f} million parameters (lower is better)"
    save(figure, path, title, whiskers("steps"), machine)


def plot_overlap(path: str, results: Sequence[OverlapResult], machine: str) -> None:
    """Plot the part of the communication that is hidden behind backward as bars.

    Args:
        path: The PNG file to write.
        results: The results of `overlap`.
        machine: Versions and the machine, in one line.
    """
    figure, (axes,) = canvas(1, size=(7.0, 0.9 + 0.33 * len(results)))
    bars = []
    for r in results:
        there = r.could > 0  # below 0 there is only noise
        text = f"{round(100 * r.hidden)} % of {r.could * 1e3:.1f} ms" if there else "nothing to hide"
        ends = (100 * r.quartiles[0], 100 * r.quartiles[2]) if there else None
        bars.append(Bar(r.name, HVDLITE, 100 * r.hidden if there else None, text, ends))
    draw_bars(axes, bars)
    axes.axvline(100, color=DARK, lw=0.8, ls="--")
    describe(axes, "", "% of the communication that could be hidden")
    note = f"{whiskers('rounds')} Dashed: all of it. Elsewhere: the cores are idle in backward, as with a GPU."
    save(figure, path, "Communication hidden behind backward (higher is better)", note, machine)


def plot_prices(path: str, prices: Sequence[Price], machine: str) -> None:
    """Plot the time of each collective as bars: a panel for each size.

    Args:
        path: The PNG file to write.
        prices: The results of `ops`.
        machine: Versions and the machine, in one line.
    """
    sizes = [nbytes for nbytes in dict.fromkeys(price.nbytes for price in prices) if nbytes]
    named = {(price.name, price.nbytes): price for price in prices}
    names = [name for name in dict.fromkeys(price.name for price in prices) if (name, sizes[-1]) in named]
    figure, panels = canvas(len(sizes), size=(3.9, 0.8 + 0.42 * len(names)), share="y")
    for axes, nbytes in zip(panels, sizes, strict=True):
        bars = []
        for name in names:
            price = named[name, nbytes]
            bars.append(price_bar(name, HVDLITE, price.seconds, price.spread.get("hvdlite")))
            bars.append(price_bar("mpi4py", Look(RED), price.bare, price.spread.get("mpi4py")))
        draw_bars(axes, bars)
        describe(axes, f"{readable(nbytes)} on each rank", "µs")
    save(figure, path, "Time of each collective, beside the bare mpi4py call (lower is better)",
         f"{whiskers('calls')} Each size has a scale of its own.", machine)  # fmt: skip


def price_bar(name: str, look: Look, seconds: float | None, spread: Quartiles | None) -> Bar:
    """The bar of one call, in microseconds."""
    if seconds is None:
        return Bar(name, look, None, "-")
    text = f"{seconds * 1e6:.1f}" if seconds < 1e-4 else f"{seconds * 1e6:.0f}"
    return Bar(name, look, seconds * 1e6, text, spread and (spread[0] * 1e6, spread[1] * 1e6))


def plot_compression(path: str, rows: Sequence[Row], machine: str) -> None:
    """Plot a row of panels for each problem: the held-out loss against time, and the speedup on each network.

    Args:
        path: The PNG file to write.
        rows: The results of `compression`.
        machine: Versions and the machine, in one line.
    """
    from hvdlite.bench.compression import PLAIN, TARGET

    plain = {row.problem: row for row in rows if row.compressor == PLAIN}
    links = list(dict.fromkeys(link for base in plain.values() for link in base.speeds))
    figure, panels = canvas(1 + len(links), len(plain), size=(4.4, 3.9))
    for number, (problem, base) in enumerate(plain.items()):
        curves, *bars = panels[number * (1 + len(links)) :][: 1 + len(links)]
        mine = [row for row in rows if row.problem == problem]
        slowest = max(base.speeds, key=lambda link: base.speeds[link].seconds)
        lines = []
        for row in (row for row in mine if slowest in row.speeds):
            steps, losses, band = row.curve
            seconds = [step * row.speeds[slowest].seconds for step in steps]
            lines.append(Line(row.title, COMPRESSED[row.compressor], seconds, losses, band))
        draw_lines(curves, lines)
        curves.set(xscale="log")
        describe(curves, f"{problem}, {slowest}", "training time: steps * time of a step", "loss (lower is better)")
        in_seconds(curves, "x")
        label_ends(figure, curves, lines)
        for axes, link in zip(bars, links, strict=True):
            if axes is not bars[0]:
                axes.sharex(bars[0])
                axes.sharey(bars[0])
                axes.tick_params(labelleft=False)
            found = [(row, row.faster(base, link)) for row in mine]
            draw_bars(axes, [
                Bar(row.title, COMPRESSED[row.compressor], how and how[0], f"{how[0]:.1f}" if how else "not reached",
                    how and how[1])
                for row, how in found
            ])  # fmt: skip
            axes.axvline(1, color=DARK, lw=0.8, ls="--")
            describe(axes, f"{problem}, {link}", "times as fast (higher is better)")
    save(figure, path, "Training with compressed gradients: loss over time, and time to one loss",
         f"Lines: means, bands and whiskers: quartiles of {len(rows[0].curves)} trainings. Times as fast: to the loss "
         f"that training without compression has after {TARGET:.0%} of its steps.", machine)  # fmt: skip


def plot_strategies(path: str, rows: Sequence[StrategyRow], machine: str) -> None:
    """Plot the held-out loss against time: a panel for each condition, and a line for each strategy.

    Args:
        path: The PNG file to write.
        rows: The results of `strategies`.
        machine: Versions and the machine, in one line.
    """
    from hvdlite.bench.strategies import TARGET, conditions

    found = conditions(rows)
    figure, panels = canvas(len(found), size=(6.6, 4.6), share="xy")
    every = []
    for axes, (condition, (plain, its)) in zip(panels, found.items(), strict=True):
        lines = []
        for row in its:
            seconds = row.time_to(plain.target)
            there = f"{seconds:.1f} s" if seconds is not None else "not reached"
            lines.append(Line(f"{row.title}: {there}", KEPT_TOGETHER[row.strategy], row.seconds, row.losses, row.band))
            if seconds is not None:
                axes.plot(seconds, plain.target, "*", ms=9, color=lines[-1].look.color, mec="white", mew=0.5, zorder=3)
        draw_lines(axes, lines)
        axes.axhline(plain.target, color=DARK, lw=0.9, ls=":", zorder=1.5)
        axes.set(yscale="log")
        describe(axes, condition[:1].upper() + condition[1:], "seconds of training")
        in_numbers(axes)
        every.append(lines)
    panels[0].set_ylabel("loss on data that is not trained on", fontsize=FONT, color=DARK)
    for axes, lines in zip(panels, every, strict=True):
        label_ends(figure, axes, lines)
    plain = next(iter(found.values()))[0]
    save(figure, path, "Loss while training, for each strategy (lower is better)",
         f"Lines: means, bands: quartiles of {len(plain.runs)} trainings. Stars, and seconds at names: the loss that "
         f"synchronous training has after {TARGET:.0%} of its time.", machine)  # fmt: skip
