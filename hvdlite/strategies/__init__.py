"""Strategies: how the ranks' models are kept together, if not by averaging every gradient.

    optimizer = hvd.DistributedOptimizer(optimizer, strategy=hvd.LocalSGD(sync_every=8))

Each rank then trains with gradients of its own, and a strategy moves the weights of all ranks together now and then.
A strategy is one file here. It consists of a `Strategy`, the user's immutable settings, and of a `Running`, which works
for one attached optimizer. Both know arrays only. An adapter calls the `Running` around each update of its optimizer:

    update_begins()     every update; cheap. Returns whether before_update must follow
    before_update       may change weights in place
    (the optimizer changes the weights)
    update_ends()       every update; cheap. Returns whether after_update must follow
    after_update        may change weights in place

Belongs here: what is exchanged when, and the arithmetic. Not here: how arrays are reduced (`ops/`), messages without a
roll call (`lanes/mailbox.py`), and the hooks of a framework's optimizer (the adapters).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from hvdlite.arrays import Array
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet, global_process_set


class Reach(Enum):
    """The ranks over which gradients are averaged in one update."""

    NONE = "each rank uses its own gradients"
    HOST = "the ranks of a host average gradients"
    EVERYONE = "all ranks average gradients"


@dataclass(frozen=True)
class Site:
    """One attached optimizer, as a strategy sees it.

    Attributes:
        group: The ranks whose models are kept together.
        name: Names the strategy's operations; equal on all ranks, and different for each optimizer.
        title: The optimizer in messages.
        names: The parameters' names, in the order of the arrays that `Running` gets.
        process_set: The same ranks, as the user named them.
    """

    group: Group
    name: str
    title: str
    names: Sequence[str]
    process_set: ProcessSet = global_process_set


@dataclass(frozen=True)
class Strategy:
    """The user's settings of one strategy. Equal on all ranks: `repr` is compared when an optimizer is attached."""

    def start(self, site: Site) -> Running:
        """Begin to work for one optimizer. Collective; waits for all ranks. The weights may still change."""
        raise NotImplementedError

    def reach(self, step: int) -> Reach:
        """The ranks over which gradients are averaged in update number `step`, from 1."""
        return Reach.NONE

    @property
    def reaches(self) -> frozenset[Reach]:
        """What `reach` may return."""
        return frozenset([Reach.NONE])

    @property
    def joins(self) -> bool:
        """Whether other ranks can go on after a rank has called `join()`."""
        return True

    @property
    def wants_state(self) -> bool:
        """Whether `after_update` needs the optimizer's state."""
        return False


def require_strategy(given: object) -> None:
    """Raise TypeError unless the user's `strategy=` is a strategy."""
    if not isinstance(given, Strategy):
        kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise TypeError(f"strategy= takes a strategy, such as hvd.LocalSGD(sync_every=8), not {kind}")


def require_joins(strategy: Strategy) -> None:
    """Raise RuntimeError if other ranks could not go on after a rank has called `join()`."""
    if not strategy.joins:
        raise RuntimeError(
            f"hvd.join() is not possible with strategy={strategy!r}: other ranks would wait for this one for ever. "
            "Give all ranks equally many batches [HVD431]"
        )


class Running:
    """A strategy at work for one optimizer. The base class does nothing; ranks then train alone.

    Weights and gradients are lists of arrays, one for each parameter, always in the same order. Arrays lie on the host
    (NumPy) or on a GPU (CuPy). They may be other objects in each call. A parameter without a gradient has None.
    """

    @property
    def sent_bytes(self) -> float:
        """The bytes of weights that this rank has sent to other hosts so far."""
        return 0.0

    def update_begins(self) -> bool:
        """An update begins. Returns whether the caller must call `before_update`."""
        return False

    def before_update(self, weights: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        """See weights and gradients before an update, and perhaps change weights in place."""

    def update_ends(self) -> bool:
        """An update has ended, even if it moved nothing. Returns whether the caller must call `after_update`."""
        return False

    def after_update(self, weights: Sequence[Array], state: Mapping[str, Array]) -> bool:
        """See the weights after an update, and perhaps change them in place.

        Args:
            weights: The weights.
            state: The optimizer's state as arrays by name, if the strategy wants it; it may change, too. Ranks may lack
                some of it.

        Returns:
            Whether all ranks have equal weights now.
        """
        return False

    def prepare(self) -> None:
        """This rank is about to settle: others must not wait for its next update. Waits for nobody."""

    def settle(self, weights: Sequence[Array]) -> None:
        """Finish what is under way, so that all ranks may read and change weights. Collective; waits for all ranks."""

    def moved(self) -> None:
        """Weights were changed from outside, on all ranks to the same values: forget what depends on the old ones."""

    def pause(self) -> None:
        """This rank is about to wait for others, as in `join()`: they must not wait for its next update."""

    def start_over(self, step: int) -> None:
        """All ranks have joined, perhaps after different numbers of updates: go on as if all had done `step` of them.

        Weights may differ between ranks now, unless the user has broadcast them. The caller settles next.
        """

    def state(self) -> dict[str, Array]:
        """What a checkpoint must contain, as arrays on the host."""
        return {}

    def load(self, state: Mapping[str, Array]) -> None:
        """Continue from the values that `state` returned. Waits for nobody."""

    def abandon(self) -> None:
        """The optimizer is gone on this rank, perhaps not on others. Waits for nobody."""

    def close(self) -> None:
        """The optimizer is detached: end threads, and free communicators. Called on all ranks, unless the job broke."""
