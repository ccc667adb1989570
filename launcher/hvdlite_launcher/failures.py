"""Which of a job's failures was the first: the one whose rank is told to the user, and whose code is the job's.

On one host the first to create a file wins, and there is no more to it. On several, each host knows its own first,
and the news travel; so a failure waits a moment for an earlier one. Last of all comes a death by SIGTERM, which is
the work of an MPI that ends a job which failed elsewhere. A rank that ends with an exit code comes after one that was
killed at the same time: Open MPI ends ranks so that have lost a connection (code 14), within milliseconds.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field

_MOMENT = 0.2  # seconds
_HANDICAP = 0.05  # seconds


@dataclass(frozen=True)
class Failure:
    """A rank's end. signal: 0 unless one killed it; -1: none, nor a code, but it never called hvd.shutdown().
    when: seconds since the epoch by our clock. host: "" for ours."""

    rank: int
    code: int
    signal: int
    when: float = 0.0
    host: str = ""

    @property
    def weak(self) -> bool:
        """Whether it is probably the consequence of another one."""
        return self.code == 128 + signal.SIGTERM

    @property
    def order(self) -> tuple[bool, float]:
        """The least comes first."""
        return self.weak, self.when + (0.0 if self.signal else _HANDICAP)


def parse(note: str, host: str = "", offset: float = 0.0) -> Failure:
    """Read the note of a keeper or a rank. offset: what to add to its host's clock. Raises ValueError."""
    rank, code, number, when = note.split()
    return Failure(int(rank), int(code), int(number), float(when) + offset, host)


@dataclass
class Failures:
    """What all hosts have reported so far. several: whether there is more than one host."""

    several: bool = False
    _found: dict[str, Failure] = field(default_factory=dict)
    _since: float | None = None
    _first: Failure | None = None

    def add(self, failure: Failure | None) -> None:
        """Note a host's first failure; later ones of the same host are ignored."""
        if failure is not None:
            self._found.setdefault(failure.host, failure)
            self._since = time.monotonic() if self._since is None else self._since

    def first(self, final: bool = False) -> Failure | None:
        """The job's first failure, the same ever after; None while there is none, or news may be on their way.

        final: there will be no more news.
        """
        if self._first is None and self._found:
            assert self._since is not None
            if final or not self.several or time.monotonic() - self._since > _MOMENT:
                self._first = min(self._found.values(), key=lambda failure: failure.order)
        return self._first
