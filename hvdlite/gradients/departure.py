"""The departure of a reducer's buckets: during backward, at its end, or as a trial has shown.

The reducer asks a `Departure` in every round whether a full bucket may leave before backward ends. The decision comes
from `policy`, or from `overlap_trial` after some rounds. A departure also keeps the order in which gradients came, for
a better plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.gradients.overlap_trial import Trial


class Departure:
    """The time when the buckets of one plan leave.

    Attributes:
        overlap: Whether buckets leave during backward in the round under way.
        learn: Whether the first round of all ranks is to learn the order of gradients.
        trial: The trial under way; None: the decision is made.
        order: The order in which rank 0's gradients came in the first round of all ranks; None before.
    """

    def __init__(self, overlap: bool | None, learn: bool = False) -> None:
        """
        Args:
            overlap: Whether buckets leave during backward; None: a trial decides.
            learn: Whether to learn the order of gradients for another plan, if the order matters. That plan's departure
                then makes the trial.
        """
        self.overlap = overlap is not False
        self.learn = learn and self.overlap
        self.trial = Trial() if overlap is None and not self.learn else None
        self.order: list[int] | None = None

    def forget(self) -> None:
        """Do not count the round in the trial: it failed, or ranks had joined."""
        if self.trial:
            self.trial.forget()

    def set_order(self, order: Sequence[int]) -> None:
        """Keep the order of gradients, which all ranks know now."""
        self.order, self.learn = list(order), False

    def set_overlap(self, overlap: bool) -> None:
        """End the trial with a decision that all ranks share."""
        self.overlap, self.trial = overlap, None

    def next_round(self) -> None:
        """Go on to the trial's next round."""
        if self.trial:
            self.overlap = self.trial.early
