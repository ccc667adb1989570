"""What a stall looks like, from what each rank says of itself: who waits for whom, in which collective. Pure functions.

A rank that does not answer is stopped, or dead, or in compiled code that holds Python's lock: whatever others wait
for, they wait for it too.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdlite.lanes.calls import COLLECTIVE, GRADIENTS
from hvdlite.lanes.matching import ranks
from hvdlite.lanes.signature import UNEVEN

MOST_CALLS = 6  # listed per rank
PAGE_WIDTH = 160  # where stderr is no terminal
NO_ANSWER = "no answer (stopped, or in code that holds Python's lock)"


@dataclass(frozen=True)
class Wait:
    """One collective that a rank has called and that is not done."""

    lane: str
    members: tuple[int, ...]
    key: str
    seconds: float
    """Since the rank called it."""
    working: float
    """Since all ranks had; 0.0 where some have not."""
    called: float = 0.0
    """When, by that rank's clock: tells it from others of its name."""
    title: str = ""
    """Its name in messages."""


@dataclass(frozen=True)
class Report:
    """What a rank says of itself."""

    position: str
    waits: tuple[Wait, ...] = ()
    joined: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    """Lanes (name and members) in which it takes part in whatever the others call."""
    stuck: bool = False
    """Its main thread, and no other has ever called hvdlite, waits for these."""


@dataclass(frozen=True)
class Stall:
    """One collective that does not end. lacking: the ranks it waits for; none: all have called, the work goes on."""

    key: str
    waiting: tuple[int, ...]
    lacking: tuple[int, ...]
    seconds: float
    title: str = ""
    """Its name in messages."""

    @property
    def of_gradients(self) -> bool:
        return self.title.startswith(GRADIENTS)


def diagnose(reports: Sequence[Report | None], patience: float) -> list[Stall]:
    """The collectives in which ranks have waited for `patience` seconds, longest first. reports: by rank; None: no
    answer."""
    waits: dict[tuple[str, str, tuple[int, ...]], dict[int, Wait]] = {}
    for rank, report in enumerate(reports):
        for wait in report.waits if report else ():
            waits.setdefault((wait.lane, wait.key, wait.members), {})[rank] = wait
    stalls = []
    for (lane, key, members), found in waits.items():
        joined = {m for m in members if (report := reports[m]) and (lane, members) in report.joined}
        lacking = tuple(m for m in members if m not in found and m not in joined)
        if any(wait.working for wait in found.values()):
            lacking = tuple(m for m in lacking if reports[m] is None)  # all had called it, and some are done
        times = [wait.seconds if lacking else wait.working for wait in found.values()]
        if max(times) >= patience:
            title = next((wait.title for wait in found.values() if wait.title), key)
            stalls.append(Stall(key, tuple(found), lacking, max(times), title))
    return sorted(stalls, key=lambda stall: -stall.seconds)


def deadlocked(reports: Sequence[Report | None], least: float) -> bool:
    """Whether no rank can go on: all are stuck in what others have not called. least: seconds since the first was
    asked; who waits for less may have been elsewhere then."""
    if not all(report and report.stuck and report.waits for report in reports):
        return False
    waits = [wait.seconds for report in reports if report for wait in report.waits]
    return min(waits) >= least and all(stall.lacking for stall in diagnose(reports, 0.0))


def identities(reports: Sequence[Report | None]) -> list[set[tuple[Any, ...]]]:
    """What each rank waits in, to be compared with another answer of it."""
    return [{(wait.lane, wait.members, wait.key, wait.called) for wait in report.waits} if report else set()
            for report in reports]  # fmt: skip


def summary(stall: Stall) -> str:
    """allreduce 'loss': ranks 0-1 have waited 60 s for rank 2."""
    who = f"{ranks(stall.waiting)} {'has' if len(stall.waiting) == 1 else 'have'}"
    if not stall.lacking:
        return f"{stall.title}: all ranks have called it, and {who} been at it for {stall.seconds:.0f} s"
    return f"{stall.title}: {who} waited {stall.seconds:.0f} s for {ranks(stall.lacking)}"


def letter(reports: Sequence[Report | None], stalls: Sequence[Stall]) -> str:
    """The error's text: each stall, and where the ranks are that are waited for."""
    missing = sorted({rank for stall in stalls for rank in stall.lacking})
    lines = [f"{summary(stall)}." for stall in stalls[:MOST_CALLS]]
    for rank in missing:
        report = reports[rank]
        lines.append(f"Rank {rank}: {NO_ANSWER}." if report is None else f"Rank {rank} is at {report.position}")
    if any(reports[rank] for stall in stalls if not stall.of_gradients for rank in stall.lacking):
        lines.append(COLLECTIVE if len(stalls) == 1 else "Each of them is collective: every rank must call it.")
    if any(stall.of_gradients for stall in stalls):
        lines.append(UNEVEN)
    return "\n".join(lines)


def rows(reports: Sequence[Report | None], stalls: Sequence[Stall]) -> list[tuple[str, str, str, str]]:
    """The table: ranks, what they wait in, for whom and how long, where they are. Ranks of which all is equal share."""
    groups: dict[tuple[str, str, str], list[int]] = {}
    for rank, report in enumerate(reports):
        mine = [stall for stall in stalls if rank in stall.waiting]
        calls = [stall.title for stall in mine[:MOST_CALLS]]
        if len(mine) > MOST_CALLS:
            calls.append(f"... and {len(mine) - MOST_CALLS} more")
        awaited = [f"{ranks(s.lacking) if s.lacking else 'nobody'}, {s.seconds:.0f} s" for s in mine[:MOST_CALLS]]
        row = ("\n".join(calls), "\n".join(awaited), report.position if report else NO_ANSWER)
        groups.setdefault(row, []).append(rank)
    return [(ranks(who).removeprefix("ranks ").removeprefix("rank "), *row) for row, who in groups.items()]


def show(reports: Sequence[Report | None], stalls: Sequence[Stall]) -> None:
    """Print the table on stderr."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"hvdlite: {summary(stalls[0])}", title_justify="left", title_style="", box=box.SIMPLE)
    for heading in ("rank", "waits in", "for", "Python is at"):
        table.add_column(heading, overflow="fold")
    for row in rows(reports, stalls):
        table.add_row(*(Text(cell) for cell in row))
    terminal = Console(stderr=True)
    page = Console(file=io.StringIO(), width=terminal.width if terminal.is_terminal else PAGE_WIDTH)
    with page.capture() as printed:
        page.print(table)
    lines = [line.rstrip() for line in printed.get().splitlines()]
    print("\n".join(line for line in lines if line), file=sys.stderr, flush=True)
