"""Agreements among the ranks of one host in shared memory, without messages.

An agreement of two ranks takes a third of the time that messages take (MEASURED.md, "Details").
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from hvdlite.arrays import LINE, Array
from hvdlite.transports import LOOKS, MAIN, in_main

ORDERED = platform.machine() == "x86_64"
"""Whether all processors see the writes of one in their order without a fence. On ARM they may not."""
MOST_RANKS = 32  # each rank looks at all others; messages take log2 p steps
LINES = 2  # per rank, for one maximum
WORDS = LINE // 8
FLAG_BYTES = 2 * LINES * LINE
PATIENCE = 8  # the main thread looks at MPI, which releases the GIL, only after so many looks at a line


class SharedMaximum:
    """A Maximum of five values. Each rank writes its values into a line, then the call's number, and reads the others'.

    Each rank has two lines, used in turn: a late rank may still read the previous call's line. No rank begins the call
    after next before that rank has come to the next one.

    Args:
        lines: Every rank's lines as bytes, in rank order, at first zeros.
        rank: This rank.
        look: Called with the rank waited for. It calls MPI, which makes progress, and raises if that rank has failed.
    """

    def __init__(self, lines: Sequence[Array], rank: int, look: Callable[[int], Any]) -> None:
        self.lines, self.look = [line.data.cast("q") for line in lines], look
        self.mine, self.others = self.lines[rank], [other for other in range(len(lines)) if other != rank]
        self.values: Sequence[int] = ()
        self.number = self.looks = 0
        self.rest: list[int] = []
        """The ranks still waited for, the next one last."""

    def start(self, values: tuple[int, ...]) -> bool:
        """Publish five values. Returns True if all ranks have published the same already; otherwise call `test`.

        The look, and words written one by one, save about 20 us when caches are cold (MEASURED.md, "Details").
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
        """The barrier: a call without values. Waits for all ranks."""
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
