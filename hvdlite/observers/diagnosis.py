"""Functions that find stalls and deadlocks in the reports of all ranks, and write the report's text.

The stall watch that has asked all ranks calls them. A rank without a report is stopped or dead, or runs code that holds
Python's lock. So every wait on one of its lanes counts as a wait for it. Only `show` has a side effect: it prints the
report's table.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from hvdlite.lanes.calls import COLLECTIVE, GRADIENTS
from hvdlite.lanes.matching import ranks
from hvdlite.lanes.signature import UNEVEN

MOST_CALLS = 6  # listed per rank
PAGE_WIDTH = 160  # where stderr is no terminal
NO_ANSWER = "no answer (stopped, or in code that holds Python's lock)"
Identity: TypeAlias = tuple[object, ...]
"""A wait of a rank, to compare it with a wait in a later report of the rank."""


@dataclass(frozen=True)
class Wait:
    """A collective that a rank has called and that is not done.

    Attributes:
        lane: The name of its lane.
        members: The ranks of that lane.
        key: The request's key, equal on all ranks.
        seconds: Time since the rank called it.
        working: Time since all ranks had called it; 0.0 if some have not.
        called: When the rank called it, by the rank's clock. Tells it from others with the same key.
        title: Its name in messages.
    """

    lane: str
    members: tuple[int, ...]
    key: str
    seconds: float
    working: float
    called: float = 0.0
    title: str = ""


@dataclass(frozen=True)
class Report:
    """The state of one rank.

    Attributes:
        position: The line that its main thread is at.
        waits: The collectives that it waits in.
        joined: The lanes (name and members) in which it has joined, and so takes part in other ranks' calls.
        stuck: Whether only other ranks can make it go on.
    """

    position: str
    waits: tuple[Wait, ...] = ()
    joined: frozenset[tuple[str, tuple[int, ...]]] = frozenset()
    stuck: bool = False


@dataclass(frozen=True)
class Stall:
    """A collective that does not end.

    Attributes:
        key: The request's key.
        waiting: The ranks that wait in it.
        lacking: The ranks that it waits for; none if all have called it, and its work goes on.
        seconds: The longest wait.
        title: Its name in messages.
        lane: The name of its lane.
        members: The ranks of that lane.
    """

    key: str
    waiting: tuple[int, ...]
    lacking: tuple[int, ...]
    seconds: float
    title: str = ""
    lane: str = ""
    members: tuple[int, ...] = ()

    @property
    def of_gradients(self) -> bool:
        """Whether it reduces gradients."""
        return self.title.startswith(GRADIENTS)


def diagnose(reports: Sequence[Report | None], patience: float) -> list[Stall]:
    """The collectives in which ranks have waited for `patience` seconds, with the longest wait first.

    Args:
        reports: By rank; None for no answer.
        patience: The shortest wait of interest, in seconds.
    """
    waits: dict[tuple[str, str, tuple[int, ...]], dict[int, Wait]] = {}
    for rank, report in enumerate(reports):
        for wait in report.waits if report else ():
            waits.setdefault((wait.lane, wait.key, wait.members), {})[rank] = wait
    stalls = []
    for (lane, key, members), found in waits.items():
        joined = {m for m in members if (report := reports[m]) and (lane, members) in report.joined}
        lacking = tuple(m for m in members if m not in found and m not in joined)
        if any(wait.working for wait in found.values()):
            lacking = tuple(m for m in lacking if reports[m] is None)  # all ranks had called it, and some are done
        times = [wait.seconds if lacking else wait.working for wait in found.values()]
        if max(times) >= patience:
            title = next((wait.title for wait in found.values() if wait.title), key)
            stalls.append(Stall(key, tuple(found), lacking, max(times), title, lane, members))
    return sorted(stalls, key=lambda stall: -stall.seconds)


def deadlocked(reports: Sequence[Report | None], least: float) -> bool:
    """Whether no rank can go on, since each is stuck in a collective that others have not called.

    Args:
        reports: By rank; None for no answer.
        least: Seconds since the first rank was asked. A rank that has waited for less may not have waited then.
    """
    if not all(report and report.stuck and report.waits for report in reports):
        return False
    waits = [wait.seconds for report in reports if report for wait in report.waits]
    return min(waits) >= least and all(stall.lacking for stall in diagnose(reports, 0.0))


def identities(reports: Sequence[Report | None]) -> list[set[Identity]]:
    """The waits of each rank, to compare them with a later report."""
    return [{(wait.lane, wait.members, wait.key, wait.called) for wait in report.waits} if report else set()
            for report in reports]  # fmt: skip


def summary(stall: Stall) -> str:
    """One line, as in 'allreduce loss: ranks 0-1 have waited 60 s for rank 2'."""
    who = f"{ranks(stall.waiting)} {'has' if len(stall.waiting) == 1 else 'have'}"
    if not stall.lacking:
        return f"{stall.title}: all ranks have called it, and {who} been at it for {stall.seconds:.0f} s"
    waited = f"{stall.seconds:.0f}" if stall.seconds >= 1 else f"{stall.seconds:.1g}"
    return f"{stall.title}: {who} waited {waited} s for {ranks(stall.lacking)}"


def letter(reports: Sequence[Report | None], stalls: Sequence[Stall]) -> str:
    """The error's text: each stall, and the positions of the ranks that others wait for."""
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
    """The table of a report: ranks, their collectives, the ranks that these wait for, and positions.

    Ranks with equal entries share a row.
    """
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
    """Print the table of a report on stderr."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"hvdlite: {summary(stalls[0])} [HVD901]", title_justify="left", title_style="", box=box.SIMPLE)
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
