"""When a reducer's buckets leave: during backward, at its end, or as a trial has shown."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.gradients.overlap_trial import Trial


class Departure:
    """When the buckets of one plan leave.

    overlap: whether buckets leave during backward; None: to be tried. learn: whether to find out the order in which
    gradients come, if it matters, for another plan. What is to be tried is that plan's then.
    """

    def __init__(self, overlap: bool | None, learn: bool = False) -> None:
        self.overlap = overlap is not False
        """Whether they leave during backward in the round under way."""
        self.learn = learn and self.overlap
        self.trial = Trial() if overlap is None and not self.learn else None
        self.order: list[int] | None = None
        """For a better plan: the order in which rank 0's gradients came in the first round of all ranks."""

    def forget(self) -> None:
        """The round does not count: it has failed, or ranks were missing."""
        if self.trial:
            self.trial.forget()

    def set_order(self, order: Sequence[int]) -> None:
        """All ranks know the order."""
        self.order, self.learn = list(order), False

    def set_overlap(self, overlap: bool) -> None:
        """The trial is over, and all ranks know what was faster."""
        self.overlap, self.trial = overlap, None

    def next_round(self) -> None:
        """The trial goes on."""
        if self.trial:
            self.overlap = self.trial.early
