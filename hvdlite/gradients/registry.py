"""What this process remembers about variables and reductions: the one mutable object of `gradients/` at module level.

It does not belong to a job, and so not to `job.runtime`: users name variables before `hvd.init()`, and the variables
outlive `hvd.shutdown()`. All members are held weakly, so that nothing here keeps a model or a callback alive.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

from hvdlite.gradients.tensors import Variable
from hvdlite.system.weak_references import Crowd


class Comparer(Protocol):
    """Somebody who compares a model's weights between ranks, so that an exchange need not."""

    def cares_for(self, variable: Variable) -> bool:
        """Whether the variable is one of that model's."""
        ...


class ReductionCount:
    """Reductions of gradients since this object was made: the proof that a training step did reduce some.

    Attributes:
        number: How often any exchange has reduced gradients.
        first: The first exchange among all ranks that began a round; None before that.
    """

    def __init__(self) -> None:
        self.number = 0
        self.first: ref[object] | None = None

    def begin(self, exchange: object) -> None:
        """An exchange among all ranks begins a round."""
        if self.first is None:
            self.first = ref(exchange)

    def add(self) -> None:
        """An exchange has reduced gradients."""
        self.number += 1


class Registry:
    """Variables that may differ between ranks, and who looks at reductions.

    Attributes:
        own: Variables that users want to differ between ranks.
        in_process_sets: Variables whose gradients are reduced within a process set.
        comparers: Callbacks whose model is training now, which compare its weights. When fit() raises, its callback is
            not told; it stays here until it is dropped, or comes to the end of another fit().
        counts: The counts of reductions that somebody still reads.
    """

    def __init__(self) -> None:
        self.own = Crowd()
        self.in_process_sets = Crowd()
        self.comparers = Crowd()
        self.counts = Crowd()

    def count_reductions(self) -> ReductionCount:
        """A new count, from 0, for as long as the caller keeps it."""
        count = ReductionCount()
        self.counts.append(count)
        return count

    def round_begins(self, exchange: object) -> None:
        """An exchange among all ranks begins a round."""
        for count in self.counts:
            count.begin(exchange)

    def round_ends(self) -> None:
        """An exchange has reduced gradients."""
        for count in self.counts:
            count.add()

    def is_compared(self, variable: Variable) -> bool:
        """Whether a callback compares this variable's model."""
        return any(comparer.cares_for(variable) for comparer in self.comparers)


registry = Registry()
"""This process' registry."""
