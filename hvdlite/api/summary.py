"""`summary` and `metrics`: where the time of a job's training steps went, over all ranks."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from hvdlite.api.frameworks import peak_gpu_bytes
from hvdlite.job import folder, runtime
from hvdlite.job.records import Record, record
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDTH, BAR = 80, 30  # characters
MB = 1e6
PARTS = (("compute", "#0072B2"), ("communication", "#E69F00"), ("waiting for ranks", "#CC79A7"))
"""The parts of a step, with colors that color-blind people can tell apart (Okabe & Ito 2008)."""


@dataclass(frozen=True)
class Summary:
    """Where the time of a job went. `print` shows a table, and `as_dict` is for loggers.

    Attributes:
        records: Each rank's record.
        hosts: The number of hosts.
    """

    records: tuple[Record, ...]
    hosts: int

    def since(self, earlier: Summary) -> Summary:
        """Return the summary of the time after an earlier summary of the same job.

        Args:
            earlier: That summary.

        Returns:
            The summary of the time between.
        """
        pairs = zip(self.records, earlier.records, strict=True)
        return Summary(tuple(mine.since(before) for mine, before in pairs), self.hosts)

    def mean(self, value: Callable[[Record], float]) -> float:
        """Divide a value by a rank's steps.

        Args:
            value: Returns the value of all steps of a rank.

        Returns:
            The mean over all ranks; 0.0 without steps.
        """
        return fmean(value(each) / max(each.steps.number, 1) for each in self.records)

    @property
    def step(self) -> float:
        """The seconds of a step."""
        return self.mean(lambda each: each.steps.seconds)

    @property
    def waiting(self) -> float:
        """The seconds in which a rank waits for others, per step."""
        return self.mean(lambda each: each.steps.spent.waiting)

    @property
    def communication(self) -> float:
        """The seconds in which a rank waits while an operation is under way, per step."""
        return self.mean(lambda each: each.steps.spent.exposed) - self.waiting

    @property
    def hidden(self) -> float:
        """The seconds in which an operation is under way while the rank computes, per step."""
        hidden = self.mean(lambda each: each.steps.spent.under_way) - self.communication
        return hidden if hidden > 1e-6 else 0.0

    @property
    def computing(self) -> list[float]:
        """Each rank's seconds of computing per step."""
        return [(each.steps.seconds - each.steps.spent.exposed) / max(each.steps.number, 1) for each in self.records]

    @property
    def parts(self) -> tuple[float, float, float]:
        """The seconds of a step: computing, communication, waiting for ranks."""
        return fmean(self.computing), self.communication, self.waiting

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank that computes longest, and by how many seconds per step longer than the mean of the others."""
        mine = self.computing
        rank = mine.index(max(mine))
        others = [*mine[:rank], *mine[rank + 1 :]]
        return rank, mine[rank] - fmean(others) if others else 0.0

    @property
    def number(self) -> int:
        """The number of steps: the largest of all ranks'."""
        return max(each.number for each in self.records)

    def as_dict(self) -> dict[str, float]:
        """Return numbers for a logger. Times per step and bytes per step are means over all ranks."""
        step, (compute, communication, waiting) = self.step, self.parts
        rank, extra = self.slowest
        beginning = max((each.beginning for each in self.records), key=lambda each: each.seconds)
        found = {
            "wall_s": max(each.wall for each in self.records),
            "steps": float(self.number),
            "steps_per_s": 1 / step if step else 0.0,
            "samples_per_s": self.samples_per_second,
            "step_ms": 1e3 * step,
            "compute_ms": 1e3 * compute,
            "communication_ms": 1e3 * communication,
            "waiting_ms": 1e3 * waiting,
            "hidden_comm_ms": 1e3 * self.hidden,
            "exposed_comm_pct": 100 * (communication + waiting) / step if step else 0.0,
            "waiting_pct": 100 * waiting / step if step else 0.0,
            "slowest_rank": float(rank),
            "slowest_rank_extra_ms": 1e3 * extra,
            "pauses": fmean(each.pauses.number for each in self.records),
            "pauses_s": fmean(each.pauses.seconds for each in self.records),
            "network_bytes_per_step": self.mean(lambda each: each.steps.spent.network),
            "memory_bytes_per_step": self.mean(lambda each: each.steps.spent.memory),
            "peak_memory_mb": max(each.peak for each in self.records) / MB,
            "peak_gpu_memory_mb": max(each.peak_on_gpu for each in self.records) / MB,
            "first_step_s": beginning.seconds,
            "first_step_launch_s": beginning.launch,
            "first_step_imports_s": beginning.imports,
            "first_step_init_s": beginning.init,
        }
        return {f"hvdlite/{name}": value for name, value in found.items()}

    @property
    def samples_per_second(self) -> float:
        """The samples of all ranks per second, outside pauses. 0.0 if the user has not counted them."""
        samples = sum(each.samples / max(each.number, 1) for each in self.records)
        return samples / self.step if self.step else 0.0

    def __str__(self) -> str:
        return self.text(color=False)

    def text(self, color: bool) -> str:
        """Draw the table.

        Args:
            color: Whether to use the terminal's codes for colors.

        Returns:
            The lines.
        """
        from rich.console import Console

        colors: Literal["256"] | None = "256" if color else None
        page = Console(file=io.StringIO(), width=WIDTH, force_terminal=color, color_system=colors)
        with page.capture() as printed:
            page.print(panel(self))
        return printed.get().rstrip("\n")


def summary(since: Summary | None = None) -> Summary:
    """Print where the time of the training steps went, as a table on rank 0. Collective; waits for all ranks.

    A step ends when a torch optimizer steps, when a round of gradients of Keras or TensorFlow ends, or with
    `count_step()`. An interval in which a rank computes for more than five times as long as usual is a pause: an
    evaluation, or a checkpoint. On a GPU the table shows waits of the host only. `hvdliterun --summary` prints the same
    table at the end of a job.

    Args:
        since: An earlier summary: only the time after it counts.

    Returns:
        The summary: `as_dict()` is for loggers.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    found = gathered("hvd.summary()", since)
    if runtime.rank() == 0:
        print(found.text(color=sys.stdout.isatty()), flush=True)
    return found


def metrics(since: Summary | None = None) -> dict[str, float]:
    """Return the numbers of `summary()` for a logger. Collective; waits for all ranks.

    Args:
        since: An earlier summary, or None for the whole job.

    Returns:
        The same numbers on every rank: "hvdlite/steps_per_s", "hvdlite/exposed_comm_pct", "hvdlite/waiting_ms", ...

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    return gathered("hvd.metrics()", since).as_dict()


def count_step(samples: int = 0) -> None:
    """Count a training step of this rank, and its samples, for `summary()`. Waits for nobody.

    Steps of torch optimizers and of hvdlite's Keras and TensorFlow adapters count by themselves. A step that is counted
    twice counts once.

    Args:
        samples: The samples that this rank has trained on in the step. Then the summary has samples per second.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    live = runtime.current()
    runtime.end_step(live)
    live.observers.steps.count_samples(samples)


def gathered(call: str, since: Summary | None) -> Summary:
    """Gather all ranks' records. Collective. call: the user's call, for messages."""
    live = runtime.current()
    with calling(call):
        records = allgather_object(record(live, peak_gpu_bytes()), name="summary")
    found = Summary(tuple(records), len(live.topology.hosts))
    return found if since is None else found.since(since)


def prepare(local_rank: int) -> None:
    """A job begins: if the user wants a summary, make one when all ranks leave.

    Args:
        local_rank: Not needed.
    """
    live = runtime.current()
    style, hosts, rank = live.config.summary, len(live.topology.hosts), live.topology.rank

    def show(records: Sequence[Any]) -> None:
        text = Summary(tuple(records), hosts).text(color=style == "color")
        if not folder.write("summary", text):
            print(text, file=sys.stderr, flush=True)

    def drop(records: Sequence[object]) -> None:
        """Another rank shows the summary."""

    if style != "0":
        live.everyone.eager.farewell.gather(lambda: record(live, peak_gpu_bytes()), show if rank == 0 else drop)


# The table


def panel(found: Summary) -> RenderableType:
    """Return the table in a frame."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    lines: list[RenderableType] = [Text(heading(found))]
    if found.step:
        lines += [Text(), Text(f"A step takes {duration(found.step)}:"), bars(found)]
    lines += [Text(), facts(found)]
    return Panel(Group(*lines), title="summary", title_align="left", box=box.ROUNDED, width=WIDTH)


def heading(found: Summary) -> str:
    """Return the first line: ranks, time, steps."""
    ranks, hosts = len(found.records), found.hosts
    words = [f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"]
    words.append(f"{duration(max(each.wall for each in found.records))} in all")
    words.append(f"{found.number:,} step{'s' * (found.number != 1)}" if found.number else "no training steps")
    if found.step:
        words.append(f"{1 / found.step:,.4g} steps/s")
    if found.samples_per_second:
        words.append(f"{found.samples_per_second:,.0f} samples/s")
    return "   ".join(words)


def bars(found: Summary) -> RenderableType:
    """Return a bar for each part of a step."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=20)
    for _ in range(2):
        grid.add_column(justify="right")
    for (name, color), seconds in zip(PARTS, found.parts, strict=True):
        share = max(seconds, 0.0) / found.step
        bar = Text("█" * round(BAR * share), style=color)
        grid.add_row(f"  {name}", duration(seconds), f"{share:.0%}", bar)
    if found.hidden:
        grid.add_row("  hidden", duration(found.hidden), "", "communication while the rank computes", style="dim")
    return grid


def facts(found: Summary) -> RenderableType:
    """Return the other lines."""
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows(found):
        grid.add_row(name, value)
    return grid


def rows(found: Summary) -> Iterator[tuple[str, str]]:
    """Return names and values of the other lines."""
    rank, extra = found.slowest
    if len(found.records) > 1 and found.step:
        share = extra / max(found.computing[rank] - extra, 1e-9)
        yield "slowest rank", f"{rank}: computes {duration(extra)} ({share:.0%}) longer per step than the others"
    if (number := max(each.pauses.number for each in found.records)) > 0:
        seconds = fmean(each.pauses.seconds for each in found.records)
        yield "pauses", f"{number}, {duration(seconds)} in all: evaluation, checkpoints, other long breaks"
    if len(found.records) > 1 and found.step:
        memory, network = found.mean(lambda r: r.steps.spent.memory), found.mean(lambda r: r.steps.spent.network)
        yield "a rank sends", f"{size(memory)} per step in memory, {size(network)} to other hosts"
    yield "peak memory", peaks([each.peak for each in found.records])
    if any(each.peak_on_gpu for each in found.records):
        yield "peak on GPU", peaks([each.peak_on_gpu for each in found.records])
    slowest = max((each.beginning for each in found.records), key=lambda each: each.seconds)
    parts = [("launch", slowest.launch), ("Python and imports", slowest.imports), ("hvd.init()", slowest.init),
             ("data, model and first step" if found.number else "afterwards", slowest.first_step)]  # fmt: skip
    shown = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts if seconds)
    yield "first step" if found.number else "time", f"after {duration(slowest.seconds)}: {shown}"


def peaks(bytes_of_ranks: Sequence[int]) -> str:
    """Return the memory of each rank, or of the smallest and the largest if there are many."""
    if len(bytes_of_ranks) <= 8:
        return ", ".join(f"{rank}: {size(each)}" for rank, each in enumerate(bytes_of_ranks))
    largest = max(bytes_of_ranks)
    return f"{size(min(bytes_of_ranks))} to {size(largest)} (rank {bytes_of_ranks.index(largest)})"


def duration(seconds: float) -> str:
    """Return a time with three digits and a unit."""
    if seconds >= 100:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    return f"{1e3 * seconds:.3g} ms" if seconds >= 0.9995e-3 else f"{1e6 * seconds:.0f} us"


def size(nbytes: float) -> str:
    """Return a number of bytes with a unit."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 1e3 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes:.0f} bytes"
