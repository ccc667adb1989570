"""`SharedMaximum`: the MAX all-reduce of a roll call, and a barrier, in memory that all ranks of a lane share.

Lanes whose ranks share one host use it after their first roll call, on x86-64 with at most 32 ranks. They use messages
if the user has chosen an algorithm by messages. An agreement of two ranks takes a third of the time that messages take
(MEASURED.md, "Details").
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from threading import get_ident

from hvdlite.arrays import LINE, Array
from hvdlite.transports import LOOKS, MAIN, in_main

ORDERED = platform.machine() == "x86_64"
"""Whether all cores see one core's writes in their order without a fence. On ARM they may not."""
MOST_RANKS = 32  # each rank reads all others' lines; messages take log2 p steps
LINES = 2  # per rank, for one maximum
WORDS = LINE // 8
FLAG_BYTES = 2 * LINES * LINE
PATIENCE = 8  # the main thread calls MPI, which releases the GIL, only after so many reads of a line


class SharedMaximum:
    """A Maximum of five values. Each rank writes its values and then the call's number to its line, and reads all
    lines.

    Each rank has two lines, used in turn, because a late rank may still read the lines of the previous call. No rank
    begins call k+2 before every rank has begun call k+1.

    Args:
        lines: Every rank's lines as bytes, in rank order; zeros before the first call.
        rank: This rank.
        look: Calls MPI, so that it makes progress, and raises an error if a rank has failed. Its argument is the rank
            waited for.
    """

    def __init__(self, lines: Sequence[Array], rank: int, look: Callable[[int], object]) -> None:
        self.lines, self.look = [line.data.cast("q") for line in lines], look
        self.mine, self.others = self.lines[rank], [other for other in range(len(lines)) if other != rank]
        self.values: Sequence[int] = ()
        self.number = self.looks = 0
        self.rest: list[int] = []
        """The ranks whose values have not been read, the next one last."""

    def start(self, values: tuple[int, ...]) -> bool:
        """Publish five values. Returns True if all ranks have published the same values; otherwise call `test`.

        To compare here, and to write words one by one, saves about 20 us if caches are cold (MEASURED.md, "Details").
        """
        number = self.number = self.number + 1
        at, mine = number % LINES * WORDS, self.mine
        mine[at + 1], mine[at + 2], mine[at + 3], mine[at + 4], mine[at + 5] = values
        mine[at] = number  # last
        self.values, self.rest = values, []
        for other in self.others:
            line = self.lines[other]
            if line[at] != number or (line[at + 1], line[at + 2], line[at + 3], line[at + 4], line[at + 5]) != values:
                self.rest = self.others.copy()
                break
        return not self.rest

    def test(self) -> bool:
        at = self.number % LINES * WORDS
        while self.rest:
            theirs = self.lines[self.rest[-1]]
            if theirs[at] != self.number:
                self.looks += 1
                if self.looks % PATIENCE == 0 or not in_main():
                    self.look(self.rest[-1])
                return False
            self.rest.pop()
            self.values = list(map(max, self.values, theirs[at + 1 :]))
        return True

    def meet(self) -> None:
        """Wait for all ranks: a call without values. Collective."""
        number = self.number = self.number + 1
        at, looks = number % LINES * WORDS, 0
        self.mine[at] = number
        for other in self.others:
            theirs = self.lines[other]
            while theirs[at] != number:
                looks += 1
                if looks % PATIENCE == 0 or get_ident() != MAIN:
                    self.look(other)
                if looks > LOOKS:
                    os.sched_yield()
