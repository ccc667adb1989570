"""Small gradients: each rank leaves its own where all can read them, and adds all up into memory of its own.

    rank 0's outbox  [ gradients ]  \\ both read   [ 0 + 1 ]  rank 0's results
    rank 1's outbox  [ gradients ]  / by both     [ 0 + 1 ]  rank 1's results

In the two-shot a rank writes its part of the results where another has just read the addends: each line has to be taken
back from that core's cache first. On a machine whose cores were far apart for minutes at a time, that took 127 us for
0.3 MB instead of 30. Here nobody writes what has just been read, nor waits for others behind the sum: there are two
outboxes, used in turn, and who writes to one has seen the roll call of a round that is later than the last in which it
was read. It costs p times the reads, hence only where all ranks' gradients stay in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms import Place, shared
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.buckets import BucketPlan

TURNS = 2
MOST_BYTES = 2 << 20  # of all ranks together


def pays(plan: BucketPlan, place: Place, how: Reduction) -> bool:
    """Whether gradients travel so: on one host, few, and in one bucket. Alike on all ranks."""
    here = place.one_host and place.in_memory and plan.devices == ("host",) and how.operation != "adasum"
    return here and len(plan.buckets) == 1 and 0 < place.size * plan.nbytes("host") <= MOST_BYTES


class Outbox:
    """turns: for each of TURNS all ranks' flat buffers, in rank order, in memory that they share. results: this rank's
    own memory, as long. All ranks take their turns in the same rounds."""

    def __init__(
        self, plan: BucketPlan, turns: Sequence[Sequence[Array]], rank: int, results: Array, how: Reduction
    ) -> None:
        self.buffers, self.results = [turn[rank] for turn in turns], results
        self.places = [plan.in_shape([buffer]) for buffer in self.buffers]
        """By turn: of each gradient."""
        self.sums = [shared.one_shot(turn, results, how) for turn in turns]
        self.turn = 0
        self.filled = False
        """Whether this round's gradients lie there, rather than where results will."""

    def fill(self) -> None:
        """With what lies where results will."""
        self.buffers[self.turn][:] = self.results
        self.filled = True

    def empty(self) -> None:
        """Take back what was filled in."""
        if self.filled:
            self.results[:] = self.buffers[self.turn]

    def add_up(self) -> None:
        """Runs on the lane, once all ranks have filled theirs and called the roll."""
        turn, self.turn = self.turn, (self.turn + 1) % TURNS
        self.sums[turn]()
