"""Decides which of a job's failures was the first. hvdliterun reports that rank, and exits with its code.

On one host the first rank that creates the file `failed` wins. On several hosts each agent reports its host's first
failure, so hvdliterun waits OTHER_NEWS for the report of an earlier one. Two kinds of failures are probably
consequences of another failure, and wait CAUSE_NEWS for it: SIGTERM, with which an MPI ends the ranks of a job that
failed elsewhere, and code 14, with which Open MPI ends a rank after the process at the other end of a connection has
died.
"""

import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdlite_launcher.times import CAUSE_NEWS, OTHER_NEWS

_SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)\S*: Exited with exit code (?P<code>[1-9]\d*)")
_CONSEQUENCES = (128 + signal.SIGTERM, 14)
DESERTED, ABSENT = -1, -2  # in place of a signal: exit code 0, but without hvd.shutdown(), or without hvd.init()


@dataclass(frozen=True)
class Failure:
    """The end of a rank that failed.

    signal: the signal that killed it, 0, DESERTED or ABSENT. when: seconds since the epoch, by hvdliterun's clock.
    inside: whether it was in hvd.init().
    """

    rank: int
    code: int
    signal: int
    when: float = 0.0
    host: str = ""
    inside: bool = False

    @property
    def weak(self) -> bool:
        """Whether it is probably the consequence of another failure."""
        return self.code in _CONSEQUENCES


def parse(note: str, host: str = "", offset: float = 0.0, inside: bool = False) -> Failure:
    """The failure in a file `failed`. offset: seconds to add to that host's clock. Raises ValueError."""
    rank, code, number, when = note.split()
    return Failure(int(rank), int(code), int(number), float(when) + offset, host, inside)


def deserter(absent: Sequence[tuple[int, str]], waiting: float, patience: float) -> Failure | None:
    """The rank that has ended without hvd.init(), if others have waited there for more than `patience` seconds.

    No MPI reports this. absent: ranks that have ended without hvd.init(), and their hosts. waiting: for how many
    seconds others have waited.
    """
    if not absent or waiting <= patience:
        return None
    rank, host = min(absent)
    return Failure(rank, 1, ABSENT, time.time(), host)


def of_scheduler(line: str) -> Failure | None:
    """The failure in a line of srun (`srun: error: node2: task 2: Exited with exit code 7`), or None.

    A code above 128 is the keeper's, for a signal. srun uses the same words for ranks that it ends itself.
    """
    match = _SRUN.match(line)
    if match is None:
        return None
    code = int(match["code"])
    return Failure(int(match["rank"]), code, code - 128 if code > 128 else 0, time.time(), match["host"])


@dataclass
class Failures:
    """The first failure of each host, as reported so far. several: whether there may be several hosts."""

    several: bool = False
    _found: dict[str, Failure] = field(default_factory=dict)
    _since: float | None = None
    _first: Failure | None = None

    def add(self, failure: Failure | None) -> None:
        """Note a host's first failure. A later one of the same host counts only if it explains a weak one."""
        if failure is not None and failure.signal == ABSENT and failure.host in self._found:
            if self._found[failure.host].weak:
                self._found[failure.host] = failure
                self._first = None
        elif failure is not None:
            self._found.setdefault(failure.host, failure)
            self._since = time.monotonic() if self._since is None else self._since

    @property
    def any(self) -> bool:
        """Whether any failure has been reported."""
        return bool(self._found)

    def first(self, final: bool = False) -> Failure | None:
        """The job's first failure, or None while an earlier one may still be reported. Once decided, it does not
        change.

        final: no more reports will come.
        """
        if self._first is None and self._found:
            best = min(self._found.values(), key=lambda failure: (failure.weak, failure.when))
            assert self._since is not None
            settled = time.monotonic() - self._since > (CAUSE_NEWS if best.weak else OTHER_NEWS)
            if final or settled or not self.several:
                self._first = best
        return self._first
