"""The registry: a process' record of variables that may differ between ranks, and a count of reductions.

Users name such variables (`register_local_var`), and the checks skip them. Callbacks count reductions, to find steps
without any.

This is the one mutable object of `gradients/` at module level. It does not belong to a job, and so not to
`job.runtime`: users name variables before `hvd.init()`, and variables outlive `hvd.shutdown()`. It holds all members
weakly, so that it keeps no model or callback alive. Exchanges report their rounds here, and callbacks read the counts.
"""

from __future__ import annotations

from typing import Protocol
from weakref import ref

from hvdlite.gradients.tensors import Variable
from hvdlite.system.weak_references import Crowd


class Comparer(Protocol):
    """A callback that compares a model's weights between ranks, so that an exchange need not."""

    def cares_for(self, variable: Variable) -> bool:
        """Whether the variable belongs to that model."""
        ...


class ReductionCount:
    """A count of reductions, from which a callback knows whether a training step has reduced gradients.

    Attributes:
        number: The reductions of all exchanges since this object was made.
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
    """Variables that may differ between ranks, and observers of reductions.

    Attributes:
        own: Local variables, which differ between ranks.
        in_process_sets: Variables with gradients that are reduced within a process set.
        comparers: Callbacks that compare the weights of a model in training. If fit() raises, Keras does not call its
            callback. The callback then stays here until it is deleted, or until another fit() ends.
        counts: The counts of reductions that are in use.
    """

    def __init__(self) -> None:
        self.own = Crowd()
        self.in_process_sets = Crowd()
        self.comparers = Crowd()
        self.counts = Crowd()

    def count_reductions(self) -> ReductionCount:
        """Return a new count, which counts while the caller keeps it."""
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
