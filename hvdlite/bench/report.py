"""The results of the benchmarks as tables and JSON."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from mpi4py import MPI
from rich import box
from rich.console import Console
from rich.table import Table

from hvdlite.bench.allreduce import Row, Sweep, one_line, readable
from hvdlite.bench.collectives import IN_FLIGHT, SIZES, Price, PriceList
from hvdlite.bench.network import least_bytes
from hvdlite.bench.saved import Json

if TYPE_CHECKING:
    from hvdlite.bench.compression import Row as CompressionRow
    from hvdlite.bench.keras_step import Result as KerasResult
    from hvdlite.bench.memory import Result as MemoryResult
    from hvdlite.bench.overlap import Result as OverlapResult
    from hvdlite.bench.step import Result
    from hvdlite.bench.strategies import Row as StrategyRow

WIDTH = 120
CROWDED = 0.05


def console() -> Console:
    """Standard output: as it is on a terminal with a size, else plain text of 120 columns.

    Open MPI gives each rank a pseudo-terminal without a size, also if its own output goes to a file.
    """
    try:
        real = os.get_terminal_size(sys.__stdout__.fileno()).columns > 0 if sys.__stdout__ else False
    except OSError:
        real = False
    return Console() if real else Console(width=WIDTH, force_terminal=False, color_system=None)


@dataclass(frozen=True)
class Machine:
    """Facts about the machine and the job, for every report.

    Attributes:
        date: The time of the report, in UTC, as ISO 8601.
        cpu: The processor's name.
        cores: The cores of this host.
        ranks: The number of ranks.
        hosts: The number of hosts.
        mpi: The MPI library and its version.
        python: Python's version.
        versions: The versions of other packages, if installed.
    """

    date: str
    cpu: str
    cores: int | None
    ranks: int
    hosts: int
    mpi: str
    python: str
    versions: dict[str, str]

    @property
    def line(self) -> str:
        """All facts but the date, as a sentence."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.ranks} ranks on {self.hosts} host(s) with {self.cores} cores ({self.cpu}); " \
               f"{self.mpi}; Python {self.python}, {versions}"  # fmt: skip

    @property
    def short(self) -> str:
        """What matters most, for a figure."""
        known = [f"{name} {self.versions[name]}" for name in ("hvdlite", "torch") if name in self.versions]
        cpu = self.cpu.replace("(R)", "").replace("(TM)", "")
        where = f"{self.ranks} ranks, {self.hosts} host{'s' * (self.hosts > 1)}, {self.cores} cores ({cpu})"
        return " | ".join((where, *known, self.mpi.partition(",")[0], self.date[:10]))


def machine(comm: MPI.Comm) -> Machine:
    """The facts about this machine and job. Collective over comm."""
    packages = ("hvdlite", "mpi4py", "numpy", "torch", "cupy-cuda12x", "cupy-cuda13x")
    return Machine(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        cpu=cpu_model(),
        cores=os.cpu_count(),
        ranks=comm.Get_size(),
        hosts=len(set(comm.allgather(platform.node()))),
        mpi=MPI.Get_library_version().splitlines()[0].strip("\0 ,"),
        python=platform.python_version(),
        versions={name: found for name in packages if (found := version(name))},
    )


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def warn_of_crowding(out: Console, part: float) -> None:
    """Print a warning if ranks shared cores: then the times are those of a smaller machine.

    Args:
        out: The console.
        part: The part of the turns (0 to 1), as in `timing.Timing.crowded`.
    """
    if part > CROWDED:
        out.print(
            f"In up to {part:.0%} of the turns two ranks were on one core: other programs were running, or there are "
            "more ranks than cores. The times are those of a smaller machine.", style="bold", highlight=False,
        )  # fmt: skip


# All-reduce


def print_sweep(out: Console, sweep: Sweep) -> None:
    """Print times, bandwidths, ratios, bytes on the wire, and the latency of a scalar."""
    out.print(times_table(sweep))
    out.print(bandwidth_table(sweep))
    if ratios := ratio_table(sweep):
        out.print(ratios)
    if sweep.hosts > 1:
        out.print(wire_table(sweep))
    warn_of_crowding(out, max(row.crowded for row in sweep.rows))
    for name, seconds in sweep.latency.items():
        out.print(f"one scalar, synchronous: {seconds * 1e6:6.1f} us  {name}", highlight=False)


def new_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False, collapse_padding=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def times_table(sweep: Sweep) -> Table:
    table = new_table(
        "all-reduce, float32, sum, in place: time in us (median over calls of the slowest rank)",
        ["size", "count", *sweep.titles.values()],
    )
    for row in sweep.rows:
        times = (significant(row.seconds[k] * 1e6) if k in row.seconds else "-" for k in sweep.titles)
        table.add_row(readable(row.nbytes), str(row.count), *times)
    return table


def bandwidth_table(sweep: Sweep) -> Table:
    table = new_table(
        "algbw and busbw in GB/s: size / time, and that times 2(p-1)/p (memcpy, link, neighbor_allreduce: algbw only)",
        ["size", *sweep.titles.values()],
    )
    for row in sweep.rows:
        table.add_row(readable(row.nbytes), *(bandwidths(row, key, sweep.size) for key in sweep.titles))
    return table


def bandwidths(row: Row, key: str, size: int) -> str:
    if key not in row.seconds:
        return "-"
    algbw = significant(row.algbw(key), 2)
    return algbw if key in ("memcpy", "link", "neighbors") else f"{algbw} {significant(row.busbw(key, size), 2)}"


RATIOS = {
    "MPI / arena": ("mpi", "arena"),
    "MPI in huge pages / arena": ("mpi_huge", "arena"),
    "gloo / arena": ("gloo", "arena"),
    "arena / memcpy": ("arena", "memcpy"),
    "ring / MPI": ("ring", "mpi"),
    "allreduce_ / MPI": ("auto", "mpi"),
    "arena / link": ("arena", "link"),
    "ring / link": ("ring", "link"),
    "MPI / link": ("mpi", "link"),
    "IPC / floor": ("ipc", "copy"),
    "staged / IPC": ("staged", "ipc"),
    "staged / ring": ("staged", "ring"),
}


def ratio_table(sweep: Sweep) -> Table | None:
    """The ratios of contenders' times; None if no pair of RATIOS took part."""
    pairs = {title: pair for title, pair in RATIOS.items() if set(pair) <= set(sweep.titles)}
    if not pairs:
        return None
    table = new_table("ratios of times", ["size", *pairs])
    for row in sweep.rows:
        values = (significant(row.seconds[a] / row.seconds[b]) for a, b in pairs.values())
        table.add_row(readable(row.nbytes), *values)
    return table


def wire_table(sweep: Sweep) -> Table:
    """The bytes that the busiest host sent, in units of the least possible bytes."""
    table = new_table(
        "bytes sent by the busiest host, headers included, over 2S(h-1)/h, the least for any all-reduce of S bytes",
        ["size", *sweep.titles.values()],
    )
    for row in sweep.rows:
        least = least_bytes(row.nbytes, sweep.hosts)
        table.add_row(
            readable(row.nbytes), *(f"{row.sent[k] / least:.3f}" if k in row.sent else "-" for k in sweep.titles)
        )
    return table


def significant(number: float, most_places: int = 3) -> str:
    """Three significant digits, without exponents: 0.012, 1.23, 12.3, 123, 12345."""
    if number >= 100 or number == 0:
        return f"{number:.0f}"
    places = 2 if number >= 1 else most_places
    return f"{number:.1f}" if number >= 10 else f"{number:.{places}f}"


def sweep_json(sweep: Sweep) -> Json:
    """The results for a JSON file, in seconds, bytes and GB/s."""
    rows = [
        asdict(row) | {"algbw": {k: row.algbw(k) for k in row.seconds},
                       "busbw": {k: row.busbw(k, sweep.size) for k in row.seconds if k not in ("memcpy", "link")}}
        for row in sweep.rows
    ]  # fmt: skip
    titles = {key: one_line(title) for key, title in sweep.titles.items()}
    return {"contenders": titles, "rows": rows, "scalar_latency": sweep.latency}


# Training steps


COMPARED = ("overhead", "gloo's", "ratio", "90 %")


def print_steps(out: Console, results: Sequence[Result]) -> None:
    """Print the times of training steps."""
    table = new_table(
        "training step: time in ms (median over steps of the slowest rank); overhead = time above no communication in "
        "the same round; ratio = the overheads of hvdlite and gloo, and where it lies with 90 % probability; DDP, "
        "DDP views: over the backend hvdlite, without and with gradient_as_bucket_view",
        ["model", "parameters", "steps", "no comm.", "hvdlite", "DDP views", "DDP", "DDP gloo", *COMPARED],
    )
    for r in results:
        times = (f"{seconds * 1e3:.2f}" for seconds in (*r.seconds.values(), r.overhead["hvdlite"], r.overhead["ddp"]))
        likely = f"{r.likely[0]:.2f} to {r.likely[1]:.2f}"
        table.add_row(r.name, f"{r.parameters:,}", str(r.steps), *times, f"{r.ratio:.2f}", likely)
    out.print(table)
    warn_of_crowding(out, max(r.crowded for r in results))


def print_fsdp(out: Console, found: Result) -> None:
    """Print the times of a step with fully_shard."""
    table = new_table(
        "FSDP2 step: time in ms (median over steps of the slowest rank); no comm.: sharded over one rank; "
        "communication = time above that in the same round; ratio = the communication of hvdlite and gloo, and where "
        "it lies with 90 % probability",
        ["model", "parameters", "steps", "not sharded", "no comm.", "hvdlite", "gloo", "communication", *COMPARED[1:]],
    )
    times = (found.seconds[key] for key in ("whole", "none", "hvdlite", "gloo"))
    cells = (f"{seconds * 1e3:.2f}" for seconds in (*times, found.overhead["hvdlite"], found.overhead["gloo"]))
    likely = f"{found.likely[0]:.2f} to {found.likely[1]:.2f}"
    table.add_row(found.name, f"{found.parameters:,}", str(found.steps), *cells, f"{found.ratio:.2f}", likely)
    out.print(table)
    if min(found.overhead.values()) <= 0:
        out.print(
            "Communication took no time: other programs were running. Measure again on a quiet machine.", style="bold"
        )
    warn_of_crowding(out, found.crowded)


def print_memory(out: Console, found: MemoryResult) -> None:
    """Print the memory and the times of each contender."""
    columns = [(what, key) for key in ("unsharded", "sharded") if key in found.rows for what in ("step()", "both")]
    table = new_table(
        f"{found.optimizer}, {found.parameters:,} parameters, made-up gradients: MB on the rank that has most, time in "
        f"ms (median over {found.turns} turns of {found.steps} steps of the slowest rank), and its ratios in the same "
        "round (median, lowest and highest)",
        ["", "state", "memory", "peak", "backward", "step()", *(f"{what}\n/ {key}" for what, key in columns)],
    )
    for row in found.rows.values():
        sizes = (f"{max(each) / 1e6:,.1f}" if max(each) else "-" for each in (row.state, row.memory, row.peak))
        ratios = (row.ratios[what].get(key) for what, key in columns)
        cells = ("{1:.2f}\n{0:.2f}-{2:.2f}".format(*each) if each else "" for each in ratios)
        table.add_row(row.title, *sizes, f"{row.backward * 1e3:.1f}", f"{row.step * 1e3:.1f}", *cells)
    out.print(table)
    out.print("state: of the optimizer. memory: all that the contender takes after a step. both: backward and step().",
              highlight=False)  # fmt: skip
    warn_of_crowding(out, found.crowded)


def print_overlap(out: Console, results: Sequence[OverlapResult]) -> None:
    """Print the times of communication, and the hidden part."""
    table = new_table(
        "communication behind backward: ms per step (medians of the slowest rank); hidden = part of what could hide, "
        "and the quartiles of the rounds",
        ["model", "batch", "forward", "backward", "communication", "its CPU time", "could hide", "hidden", "quartiles"],
    )
    for r in results:
        times = (r.seconds["forward"], r.backward, r.communication, r.cpu, r.could)
        quartiles = f"{r.quartiles[0]:.0%} to {r.quartiles[2]:.0%}"
        share = (f"{r.hidden:.0%}", quartiles) if r.could > 0 else ("-", "-")  # below 0: only noise
        table.add_row(r.name, str(r.batch), *(f"{t * 1e3:.1f}" for t in times), *share)
    out.print(table)


def print_compression(out: Console, rows: Sequence[CompressionRow]) -> None:
    """Print a table for each problem: bytes, accuracy and steps, and times on each network."""
    from hvdlite.bench.compression import COMPRESSORS, PLAIN, TARGET

    plain = {row.problem: row for row in rows if row.compressor == PLAIN}
    for problem, base in plain.items():
        seeds, links = len(base.curves), [*base.speeds]
        table = new_table(
            f"{problem}, {seeds} seed(s), {base.curves[0].steps[-1]} steps of {PLAIN}: KB: gradients that the busiest "
            f"rank sends per step; wire: what its host sends, with headers; accuracy: held out, points above {PLAIN}; "
            f"steps: to the loss that {PLAIN} has after {TARGET:.0%} of its steps; s: these steps * time of a step (a "
            "product, not a run)",
            [
                "",
                "KB",
                "wire",
                "accuracy",
                "",
                "steps",
                *(f"{link}\n{what}" for link in links for what in ("ms/step", "s", "x faster")),
            ],
        )
        for row in rows:
            if row.problem == problem:
                table.add_row(COMPRESSORS[row.compressor][0], *compression_cells(row, base, links))
        out.print(table)
    out.print("-: a seed does not reach the target. x faster: seconds of none / seconds.", highlight=False)


def compression_cells(row: CompressionRow, plain: CompressionRow, links: Sequence[str]) -> Iterator[str]:
    """The cells of one compressor. links: the networks on which `plain` was timed."""
    steps, at = row.steps_to_target(plain), row.speeds
    speed = next(iter(at.values()))
    yield significant(speed.gradients / 1e3)
    yield significant(speed.wire / 1e3) if speed.wire else "-"
    yield f"{row.accuracy:.1%}"
    yield f"{100 * (row.accuracy - plain.accuracy):+.1f}"
    yield f"{fmean(steps):.0f}" if len(steps) == len(row.curves) else f"{len(steps)} of {len(row.curves)}"
    for link in links:
        base, seconds = plain.seconds_to_target(plain, link), row.seconds_to_target(plain, link) if link in at else None
        yield significant(at[link].seconds * 1e3) if link in at else "-"
        yield significant(seconds) if seconds else "-"
        yield f"{base / seconds:.1f}" if base and seconds else "-"


def print_strategies(out: Console, rows: Sequence[StrategyRow]) -> None:
    """Print a table for each condition, and the strategy that is the first to reach the target under each of them."""
    from hvdlite.bench.strategies import TARGET, conditions

    answers = []
    for condition, (plain, its) in conditions(rows).items():
        columns = ["", "ms/update", "s to loss", "x faster", "accuracy", "", "KB"]
        table = new_table(f"{condition}; {len(plain.runs)} seed(s)", columns)
        for row in its:
            table.add_row(row.title, *strategy_cells(row, plain))
        out.print(table)
        there = [(seconds, row.title) for row in its if (seconds := row.time_to(plain.target)) is not None]
        answers.append(f"{condition}: {min(there)[1]}")
    out.print(
        f"s to loss: until synchronous training's loss after {TARGET:.0%} of its time (means of the seeds); "
        "x faster: synchronous / this; accuracy: of the average model at the end, held out, points above synchronous; "
        "KB: what the busiest host sends per update, with headers",
        highlight=False,
    )
    out.print(f"First at the loss: {'. '.join(answers)}.", highlight=False)


def strategy_cells(row: StrategyRow, plain: StrategyRow) -> Iterator[str]:
    """The cells of one strategy. plain: synchronous training."""
    base, seconds = plain.time_to(plain.target), row.time_to(plain.target)
    yield significant(row.update * 1e3)
    yield significant(seconds) if seconds else "never"
    yield f"{base / seconds:.1f}" if base and seconds else "-"
    yield f"{row.accuracy:.1%}"
    yield f"{100 * (row.accuracy - plain.accuracy):+.1f}"
    yield significant(row.wire / 1e3) if row.wire else "-"


def print_keras_steps(out: Console, results: Sequence[KerasResult]) -> None:
    """Print the times of training steps under Keras' fit."""
    table = new_table(
        "training step under Keras' fit: time in ms (median over steps of the slowest rank); overhead = time above no "
        "communication",
        ["model", "parameters", "no comm.", "hvdlite", "overhead", "torch's overhead", "ratio"],
    )
    for r in results:
        times = [r.seconds["none"], r.seconds["hvdlite"], r.overhead, r.torch_overhead]
        ratio = f"{r.overhead / r.torch_overhead:.2f}"
        table.add_row(r.name, f"{r.parameters:,}", *(f"{t * 1e3:.2f}" for t in times), ratio)
    out.print(table)


def overlap_json(results: Sequence[OverlapResult]) -> Json:
    rows = [asdict(r) | {"backward": r.backward, "communication": r.communication, "hidden": r.hidden} for r in results]
    return {"rows": rows}


def steps_json(results: Sequence[Result]) -> Json:
    return {"rows": [asdict(r) for r in results]}


# Every collective


def print_prices(out: Console, found: PriceList) -> None:
    """Print the times of all collectives."""
    table = new_table(
        "every collective: time in us of one call (median of the slowest rank), hvdlite beside the bare mpi4py call",
        ["call", *(f"{readable(nbytes)}{what}" for nbytes in SIZES for what in (" hvdlite", " mpi4py", " ratio"))],
    )
    for name in dict.fromkeys(price.name for price in found.prices):
        cells = [cell for price in found.prices if price.name == name for cell in price_cells(price)]
        table.add_row(name, *cells)
    out.print(table)
    out.print(f"barrier: the agreement alone. {IN_FLIGHT} ordered, shuffled: so many asynchronous all-reduces in "
              "flight, submitted in one order or by each rank in its own.", highlight=False)  # fmt: skip
    warn_of_crowding(out, found.crowded)


def price_cells(price: Price) -> tuple[str, str, str]:
    bare = "-" if price.bare is None else significant(price.bare * 1e6)
    return significant(price.seconds * 1e6), bare, "-" if price.ratio is None else significant(price.ratio)


def prices_json(found: PriceList) -> Json:
    rows = [asdict(price) | {"ratio": price.ratio} for price in found.prices]
    return {"rows": rows}
