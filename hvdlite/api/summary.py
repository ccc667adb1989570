"""`summary` and `metrics`: where the time of a job's training steps went, over all ranks."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, SupportsInt

from hvdlite.api.frameworks import peak_gpu_bytes
from hvdlite.job import folder, runtime
from hvdlite.job.records import Beginning, Record, record
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

        Raises:
            TypeError: It is no summary.
            ValueError: It is of a job that has ended with `hvd.shutdown()`.
        """
        require_earlier(earlier)
        if not self.is_of_same_job(earlier):
            raise ValueError("hvd.summary(since=...): this summary was made before the last hvd.init()")
        pairs = zip(self.records, earlier.records, strict=True)
        return Summary(tuple(mine.since(before) for mine, before in pairs), self.hosts)

    def is_of_same_job(self, other: Summary) -> bool:
        """Whether no `hvd.init()` lies between this summary and another one.

        Args:
            other: The other summary, of the same processes.

        Returns:
            Whether both are of one job.
        """
        return [each.began for each in self.records] == [each.began for each in other.records]

    def mean(self, value: Callable[[Record], float]) -> float:
        """Divide a value by a rank's steps.

        Args:
            value: Returns the value of all steps of a rank.

        Returns:
            The mean over the ranks with steps; 0.0 if there are none.
        """
        found = [value(each) / each.steps.number for each in self.records if each.steps.number]
        return fmean(found) if found else 0.0

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
    def computing(self) -> dict[int, float]:
        """By rank, the seconds of computing per step. Ranks without steps, such as parameter servers, are left out."""
        return {
            rank: (each.steps.seconds - each.steps.spent.exposed) / each.steps.number
            for rank, each in enumerate(self.records)
            if each.steps.number
        }

    @property
    def parts(self) -> tuple[float, float, float]:
        """The seconds of a step: computing, communication, waiting for ranks."""
        return self.step - self.communication - self.waiting, self.communication, self.waiting

    @property
    def slowest(self) -> tuple[int, float]:
        """The rank that computes longest, and by how many seconds per step longer than the mean of the others."""
        others = self.computing
        rank = max(others, key=lambda rank: others[rank], default=0)
        longest = others.pop(rank, 0.0)
        return rank, longest - fmean(others.values()) if others else 0.0

    @property
    def beginning(self) -> Beginning:
        """The longest time before a rank's first step; until now if no rank has stepped."""
        found = [each for each in self.records if each.number] or self.records
        return max((each.beginning for each in found), key=lambda each: each.seconds)

    @property
    def number(self) -> int:
        """The number of steps: the largest of all ranks'."""
        return max(each.number for each in self.records)

    def as_dict(self) -> dict[str, float]:
        """Return numbers for a logger. Times per step and bytes per step are means over all ranks."""
        step, (compute, communication, waiting) = self.step, self.parts
        rank, extra = self.slowest
        beginning = self.beginning
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
        stepping = [each for each in self.records if each.steps.seconds]
        return sum(each.samples / each.number * each.steps.number / each.steps.seconds for each in stepping)

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
    `count_step()`. An interval is a pause, such as an evaluation or a checkpoint, if a rank computes in it for more
    than five times as long as usual, and for 50 ms at least. On a GPU the table shows waits of the host only.
    `hvdliterun --summary` prints the same table at the end of a job.

    Args:
        since: An earlier summary: only the time after it counts.

    Returns:
        The summary: `as_dict()` is for loggers.

    Raises:
        NotInitializedError: `init()` has not been called.
        TypeError: `since` is no summary.
        ValueError: `since` is of a job that has ended with `hvd.shutdown()`.
    """
    found = gathered("hvd.summary()", since)
    if runtime.rank() == 0:
        on_terminal = getattr(sys.stdout, "isatty", None)
        show(found.text(color=bool(on_terminal and on_terminal())))
    return found


def metrics(since: Summary | None = None) -> dict[str, float]:
    """Return the numbers of `summary()` for a logger. Collective; waits for all ranks.

    Args:
        since: An earlier summary, or None for the whole job.

    Returns:
        The same numbers on every rank: "hvdlite/steps_per_s", "hvdlite/exposed_comm_pct", "hvdlite/waiting_ms", ...

    Raises:
        NotInitializedError: `init()` has not been called.
        TypeError: `since` is no summary.
        ValueError: `since` is of a job that has ended with `hvd.shutdown()`.
    """
    return gathered("hvd.metrics()", since).as_dict()


def count_step(samples: SupportsInt = 0) -> None:
    """Count a training step of this rank, and its samples, for `summary()`. Waits for nobody.

    Steps of torch optimizers and of hvdlite's Keras and TensorFlow adapters count by themselves. (In a job of one rank
    Keras and TensorFlow reduce no gradients: there only this function and `JobMetricsCallback` count.) A step that is
    counted twice counts once.

    Args:
        samples: The samples that this rank has trained on in the step. Then the summary has samples per second.

    Raises:
        NotInitializedError: `init()` has not been called.
    """
    live = runtime.current()
    runtime.end_step(id(live))
    live.observers.steps.count_samples(int(samples))


def gathered(call: str, since: Summary | None) -> Summary:
    """Gather all ranks' records. Collective. call: the user's call, for messages."""
    live = runtime.current()
    if since is not None:
        require_earlier(since)
    with calling(call):
        records = allgather_object(record(live, peak_gpu_bytes()), name="summary")
    found = Summary(tuple(records), len(live.topology.hosts))
    return found if since is None else found.since(since)


def require_earlier(since: object) -> None:
    """Raise TypeError if this is no summary."""
    if not isinstance(since, Summary):
        raise TypeError(f"since must be what hvd.summary() has returned, not {since!r}")


def since_if_same_job(now: Summary, earlier: Summary | None) -> Summary:
    """Return the summary of the time after an earlier one; all of the job without one, or if it is of another job.

    Callbacks keep the earlier summary, and `elastic.run` may have restarted the job since.
    """
    return now if earlier is None or not now.is_of_same_job(earlier) else now.since(earlier)


def show(text: str) -> None:
    """Print a summary on stdout, in question marks where stdout's encoding lacks a character."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)


def prepare(local_rank: int) -> None:
    """A job begins: if the user wants a summary, make one when all ranks leave.

    Args:
        local_rank: Not needed.
    """
    live = runtime.current()
    style, hosts, rank = live.config.summary, len(live.topology.hosts), live.topology.rank

    def mine() -> Record | str:
        """Return this rank's record, or the error that it raised. (At the end no rank waits for one that raises.)"""
        try:
            return record(live, peak_gpu_bytes())
        except Exception as error:
            return f"rank {rank}: {type(error).__name__}: {error}"

    def receive(records: Sequence[Any]) -> None:
        """Show the summary, on rank 0. A job that has ended well must not fail by its summary."""
        if rank:
            return
        try:
            failed = [each for each in records if isinstance(each, str)]
            text = f"no summary: {failed[0]}" if failed else Summary(tuple(records), hosts).text(style == "color")
            if not folder.add_to_summary(text):
                print(text, file=sys.stderr, flush=True)
        except Exception as error:
            logging.getLogger("hvdlite").warning("no summary: %s", error)

    if style != "0":
        live.everyone.eager.farewell.gather(mine, receive)


# The table


def panel(found: Summary) -> RenderableType:
    """Return the table in a frame."""
    from rich import box
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    lines: list[RenderableType] = [Text(line) for line in headings(found)]
    if found.step:
        lines += [Text(), Text(f"A step takes {duration(found.step)}:"), bars(found)]
    lines += [Text(), facts(found)]
    return Panel(Group(*lines), title="summary", title_align="left", box=box.ROUNDED, width=WIDTH)


def headings(found: Summary) -> tuple[str, str]:
    """Return the first lines: ranks and time, steps."""
    ranks, hosts = len(found.records), found.hosts
    job = [f"{ranks} rank{'s' * (ranks > 1)} on {hosts} host{'s' * (hosts > 1)}"]
    job.append(f"{duration(max(each.wall for each in found.records))} in all")
    steps = [f"{found.number:,} step{'s' * (found.number != 1)}" if found.number else "no training steps"]
    if found.step:
        steps.append(f"{1 / found.step:,.4g} steps/s")
    if found.samples_per_second:
        steps.append(f"{found.samples_per_second:,.0f} samples/s")
    return "   ".join(job), "   ".join(steps)


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
    if len(found.computing) > 1:
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
    slowest = found.beginning
    parts = [("launch", slowest.launch), ("before hvd.init()", slowest.imports), ("hvd.init()", slowest.init),
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
