"""The overlap trial: measures whether a training loop is faster if buckets leave during backward.

Over a network, early buckets save time if the lane has a free core. If all cores compute, the lane takes time from
backward, and single buckets cost more than all at once. The result depends on the model, the link and the machine. So
the first rounds of a reducer alternate between both ways, and all later rounds use the faster one. `departure` keeps
the trial, and the reducer has all ranks agree on its result.
"""

from __future__ import annotations

import time
from statistics import median

WARM_UP = 4  # rounds that do not count: caches, threads and allocators settle
EACH = 12  # rounds each way


class Trial:
    """The times of a reducer's first rounds, with buckets that leave early (True) or at the end (False), in turns.

    Attributes:
        rounds: The rounds that have ended.
        began: The time of the first gradient of the round under way; None between rounds.
        seconds: The times of rounds, from the first gradient to the results, by way.
    """

    def __init__(self) -> None:
        self.rounds = 0
        self.began: float | None = None
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    @property
    def early(self) -> bool:
        """Whether buckets leave early in the round under way, or in the next round."""
        return self.rounds % 2 == 0

    @property
    def over(self) -> bool:
        return self.rounds >= WARM_UP + 2 * EACH

    def begin(self) -> None:
        """Start the clock at the first gradient of a round; do nothing at later gradients."""
        self.began = self.began or time.perf_counter()

    def forget(self) -> None:
        """Do not count the round under way."""
        self.began = None

    def end(self) -> None:
        """Stop the clock: all ranks have the round's results."""
        if self.began is not None and self.rounds >= WARM_UP:
            self.seconds[self.early].append(time.perf_counter() - self.began)
        self.rounds, self.began = self.rounds + 1, None

    @property
    def medians(self) -> list[float]:
        """Median seconds from the first gradient to the results: with early buckets, with buckets at the end."""
        return [median(self.seconds[early]) for early in (True, False)]
