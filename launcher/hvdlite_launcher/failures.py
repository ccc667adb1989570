"""Which of a job's failures was the first: the one whose rank is told to the user, and whose code is the job's.

On one host the first to create a file wins, and there is no more to it. On several, each host knows its own first,
and the news travel; so a failure waits a moment for an earlier one. Last of all, and after a longer wait, come two
that are consequences: SIGTERM, by which an MPI ends a job that failed elsewhere, and code 14, with which Open MPI ends
a rank that has lost a connection, milliseconds after the death at its other end.
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass, field

_SRUN = re.compile(r"srun: error: (?P<host>\S+): tasks? (?P<rank>\d+)\S*: Exited with exit code (?P<code>[1-9]\d*)")
_MOMENT, _LONGER = 0.2, 1.0  # seconds
_CONSEQUENCES = (128 + signal.SIGTERM, 14)
DESERTED, ABSENT = -1, -2  # in place of a signal: it ended as if all were well, without hvd.shutdown(), or hvd.init()


@dataclass(frozen=True)
class Failure:
    """A rank's end. signal: 0 unless one killed it, or DESERTED, or ABSENT.
    when: seconds since the epoch by our clock. host: "" for ours."""

    rank: int
    code: int
    signal: int
    when: float = 0.0
    host: str = ""

    @property
    def weak(self) -> bool:
        """Whether it is probably the consequence of another one."""
        return self.code in _CONSEQUENCES


def parse(note: str, host: str = "", offset: float = 0.0) -> Failure:
    """Read the note of a keeper or a rank. offset: what to add to its host's clock. Raises ValueError."""
    rank, code, number, when = note.split()
    return Failure(int(rank), int(code), int(number), float(when) + offset, host)


def of_scheduler(line: str) -> Failure | None:
    """The failure that a line of srun's tells of (`srun: error: node2: task 2: Exited with exit code 7`), if it does.

    The keeper has made an exit code of a signal; that the scheduler ends the others is told in the same words.
    """
    match = _SRUN.match(line)
    if match is None:
        return None
    code = int(match["code"])
    return Failure(int(match["rank"]), code, code - 128 if code > 128 else 0, time.time(), match["host"])


@dataclass
class Failures:
    """What all hosts have reported so far. several: whether there is more than one host."""

    several: bool = False
    _found: dict[str, Failure] = field(default_factory=dict)
    _since: float | None = None
    _first: Failure | None = None

    def add(self, failure: Failure | None) -> None:
        """Note a host's first failure; later ones of the same host are ignored, but for the cause of a consequence."""
        if failure is not None and failure.signal == ABSENT and failure.host in self._found:
            if self._found[failure.host].weak:
                self._found[failure.host] = failure
                self._first = None
        elif failure is not None:
            self._found.setdefault(failure.host, failure)
            self._since = time.monotonic() if self._since is None else self._since

    @property
    def any(self) -> bool:
        """Whether there is one, first or not."""
        return bool(self._found)

    def first(self, final: bool = False) -> Failure | None:
        """The job's first failure, the same ever after; None while there is none, or news may be on their way.

        final: there will be no more news.
        """
        if self._first is None and self._found:
            best = min(self._found.values(), key=lambda failure: (failure.weak, failure.when))
            assert self._since is not None
            settled = time.monotonic() - self._since > (_LONGER if best.weak else _MOMENT)
            if final or settled or not self.several:
                self._first = best
        return self._first
