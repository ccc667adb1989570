"""Which figure belongs to which results: the results of a run, or those that `--json` has written earlier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

from hvdlite.bench import plot
from hvdlite.bench.allreduce import Row, Sweep
from hvdlite.bench.collectives import Price
from hvdlite.bench.report import Machine
from hvdlite.bench.saved import Json, reader, rows_of
from hvdlite.bench.timing import Quartiles
from hvdlite.errors import HvdliteError


@dataclass(frozen=True)
class Steps:
    """A model's times, from a file. See `plot.Steps`."""

    name: str
    seconds: dict[str, float]
    spread: dict[str, Quartiles]


def draw(content: Json, path: str) -> None:
    """Draw the results of a benchmark.

    Args:
        content: The results, as in the file that `--json` writes.
        path: The PNG file to write.

    Raises:
        HvdliteError: There are no such results.
    """
    name = content["benchmark"]
    if name not in FIGURES:
        raise HvdliteError(f"there is no figure of {name!r}; there are figures of {', '.join(FIGURES)}")
    machine = reader(Machine)(**cast(Mapping[str, object], content["machine"]))
    FIGURES[str(name)](path, content, machine)


def sweep(path: str, content: Json, machine: Machine) -> None:
    rows = rows_of(content, "allreduce", reader(Row))
    titles = cast(dict[str, str], content["contenders"])
    plot.plot_sweep(path, Sweep(machine.ranks, machine.hosts, titles, rows), machine.short)


def steps(path: str, content: Json, machine: Machine) -> None:
    plot.plot_steps(path, rows_of(content, str(content["benchmark"]), reader(Steps)), machine.short)


def prices(path: str, content: Json, machine: Machine) -> None:
    plot.plot_prices(path, rows_of(content, "ops", reader(Price)), machine.short)


def memory(path: str, content: Json, machine: Machine) -> None:
    from hvdlite.bench.memory import Result, Row

    found = reader(Result)(**content)
    rows = {key: reader(Row)(**cast(Mapping[str, object], row)) for key, row in found.rows.items()}
    plot.plot_memory(path, replace(found, rows=rows), machine.short)


def overlap(path: str, content: Json, machine: Machine) -> None:
    from hvdlite.bench.overlap import Result

    plot.plot_overlap(path, rows_of(content, "overlap", reader(Result)), machine.short)


def compression(path: str, content: Json, machine: Machine) -> None:
    from hvdlite.bench.compression import read

    plot.plot_compression(path, rows_of(content, "compression", read), machine.short)


def strategies(path: str, content: Json, machine: Machine) -> None:
    from hvdlite.bench.strategies import read

    plot.plot_strategies(path, rows_of(content, "strategies", read), machine.short)


FIGURES: dict[str, Callable[[str, Json, Machine], None]] = {
    "allreduce": sweep, "ops": prices, "step": steps, "keras step": steps, "fsdp": steps, "memory": memory,
    "overlap": overlap, "compression": compression, "strategies": strategies,
}  # fmt: skip
