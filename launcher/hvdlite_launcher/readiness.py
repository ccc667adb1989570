"""Explains to the user why hosts are not ready for a job, and the cure."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_CAUSES = (
    (r"Permission denied \(", "refused key: {line}", "`ssh-copy-id {host}`, or -i FILE [HVD011]"),
    (r"No \S+ host key is known", "unknown host key: {line}",
     "add it to known_hosts, as StrictHostKeyChecking wants [HVD012]"),
    (r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed", "changed host key: {line}",
     "`ssh-keygen -R {host}` if you know why the key changed [HVD012]"),
    (r"Could not resolve|Name or service not known", "unknown name: {line}", "check the host list [HVD013]"),
    (r"timed out|No route|refused|unreachable|reset|Broken pipe", "unreachable: {line}",
     "is it up, and its SSH server at this port (-p)? [HVD013]"),
    (r"No module named '?hvdlite", "no hvdlite in {package}", "install it in the same place on all hosts [HVD015]"),
    (r"No such file|not found|Permission denied|exit code 12[67]", "no such interpreter: {line}",
     "the same Python must be in the same place on all hosts [HVD015]"),
)  # fmt: skip


class NotReadyError(Exception):
    """Hosts cannot take part. states: by host, the problem, or None."""

    def __init__(self, states: Mapping[str, str | None]) -> None:
        self.states = states
        super().__init__(f"nothing was started: {len(unready(states))} of {len(states)} hosts not ready")


def explain(host: str, said: str, code: int, package: str) -> str:
    """The problem and its cure. said: what ssh or the agent has written to stderr. code: its exit code."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    line = lines[-1] if lines else f"exit code {code}"
    for pattern, cause, cure in _CAUSES:
        if re.search(pattern, f"{said} exit code {code}"):
            telling = next((text for text in lines if re.search(pattern, text)), line)
            return f"{cause}; {cure}".format(line=telling, host=host, package=package)
    return f"{line} (exit code {code})"


def verdict(ready_for: Sequence[str], not_ready: Sequence[str], warnings: Sequence[str], hosts: int) -> str:
    """One sentence about what can train.

    ready_for: "torch on CPU", "keras on CPU", ... not_ready: what cannot, with the reason. warnings: names of what may
    fail later. hosts: how many were checked.
    """
    by_device: dict[str, list[str]] = {}
    for each in ready_for:
        name, _, device = each.partition(" on ")
        by_device.setdefault(device, []).append(name)
    good = [f"{', '.join(names)} on {device}" for device, names in by_device.items()]
    sentence = f"ready for: {', '.join(good) or 'nothing'}, {hosts} host{'s' * (hosts != 1)}"
    sentence += f"; not ready: {'; '.join(not_ready)}" if not_ready else ""
    return sentence + (f"; warnings: {', '.join(dict.fromkeys(warnings))}" if warnings else "")


def show(states: Mapping[str, str | None]) -> None:
    """Print the table of hosts to stderr."""
    from rich.console import Console

    rows = [[host, problem or "ready"] for host, problem in states.items()]
    Console(file=sys.stderr, highlight=False, markup=False).print(table(("host", "state"), rows))


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for people; rows that do not end with "ready" are red."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False)
    for name in columns[:-1]:
        made.add_column(name, no_wrap=True)
    made.add_column(columns[-1], overflow="fold")
    for row in rows:
        made.add_row(*row, style=None if row[-1] == "ready" else "red")
    return made


def unready(states: Mapping[str, str | None]) -> Sequence[str]:
    """The hosts with a problem."""
    return [host for host, problem in states.items() if problem]
