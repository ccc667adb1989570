"""Whether it pays that buckets leave during backward: found out by trying.

Over a network it hides time wherever a core is free for the lane. Where all compute, the lane takes what it needs from
backward, and gradients that are sent one by one cost more than together; which is more depends on the model, the link
and the machine. So a reducer's first rounds go both ways in turns, and the rest the way that was faster.
"""

from __future__ import annotations

import time
from statistics import median

WARM_UP = 4  # rounds that do not count: caches, threads and allocators settle
EACH = 12  # rounds each way


class Trial:
    """A reducer's first rounds, in turns with buckets that leave early (True) and at the end (False)."""

    def __init__(self) -> None:
        self.rounds = 0
        self.began: float | None = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def early(self) -> bool:
        """Which way the round under way, or the next one, goes."""
        return self.rounds % 2 == 0

    @property
    def over(self) -> bool:
        return self.rounds >= WARM_UP + 2 * EACH

    def begin(self) -> None:
        """Start the clock at a round's first gradient; later calls do nothing."""
        self.began = self.began or time.perf_counter()

    def forget(self) -> None:
        """The round under way does not count."""
        self.began = None

    def end(self) -> None:
        """All ranks have the results."""
        if self.began is not None and self.rounds >= WARM_UP:
            self.seconds[self.early].append(time.perf_counter() - self.began)
        self.rounds, self.began = self.rounds + 1, None

    @property
    def medians(self) -> list[float]:
        """Seconds from the first gradient to the results: early, at the end."""
        return [median(self.seconds[early]) for early in (True, False)]
