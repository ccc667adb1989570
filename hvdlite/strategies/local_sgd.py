"""Local SGD: each rank trains alone, and every few updates all ranks continue from the average of their weights.

    rank 0   u u u u --+        +-> u u u u --+        +-> u ...      u: an update with this rank's gradients
                       +- mean -+             +- mean -+
    rank 1   u u u u --+        +-> u u u u --+        +-> u ...

Source: Stich, "Local SGD converges fast and communicates little" (2019); post-local: Lin et al., "Don't use large
mini-batches, use local SGD" (2020). Price: an all-reduce of the weights every `sync_every` updates, instead of one of
the gradients in every update. Weights of different ranks drift apart in between, which costs accuracy if many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hvdlite.arrays import Array
from hvdlite.strategies import Reach, Running, Site, Strategy
from hvdlite.strategies.averaging import average_, average_known_
from hvdlite.strategies.traffic import of_allreduce


@dataclass(frozen=True)
class LocalSGD(Strategy):
    """Average the weights of all ranks every few updates, and no gradients.

    Any optimizer can be used; it sees this rank's gradients. With `sync_every=1` and SGD the weights are those of
    synchronous training, except for rounding.

    Args:
        sync_every: The number of updates between two averages, at least 1.
        warmup_steps: In so many first updates gradients are averaged over all ranks, as without a strategy (post-local
            SGD).
        hierarchical: Whether the ranks of one host average their gradients in every update. Then only hosts differ
            between two averages.
        state: "local": the optimizer's state, such as momentum, stays each rank's own. "average": it is averaged with
            the weights, which takes as much traffic as they do, or twice that for Adam.

    Raises:
        ValueError: A number is below its least value, or `state` is another text.
    """

    sync_every: int
    warmup_steps: int = 0
    hierarchical: bool = False
    state: Literal["local", "average"] = "local"

    def __post_init__(self) -> None:
        require_count("LocalSGD", "sync_every", self.sync_every, 1)
        require_count("LocalSGD", "warmup_steps", self.warmup_steps, 0)
        if self.state not in ("local", "average"):
            raise ValueError(f"hvd.LocalSGD: state={self.state!r} must be 'local' or 'average'")

    def start(self, site: Site) -> Running:
        return LocalUpdates(self, site)

    def reach(self, step: int) -> Reach:
        if step <= self.warmup_steps:
            return Reach.EVERYONE
        return Reach.HOST if self.hierarchical else Reach.NONE

    @property
    def reaches(self) -> frozenset[Reach]:
        return frozenset([self.reach(1), self.reach(self.warmup_steps + 1)])

    @property
    def wants_state(self) -> bool:
        return self.state == "average"


def require_count(strategy: str, name: str, given: object, least: int) -> None:
    """Raise ValueError unless an argument of a strategy is an integer of at least this value."""
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or given < least:
        raise ValueError(f"hvd.{strategy}: {name}={given!r} must be a whole number, at least {least}")


class LocalUpdates(Running):
    """Local SGD for one optimizer.

    Attributes:
        how: The settings.
        site: The optimizer.
        step: The number of updates so far.
        sent: The bytes of weights that this rank has sent to other hosts.
    """

    def __init__(self, how: LocalSGD, site: Site) -> None:
        self.how, self.site = how, site
        self.step, self.sent = 0, 0.0

    @property
    def sent_bytes(self) -> float:
        return self.sent

    def update_ends(self) -> bool:
        self.step += 1
        local = self.step - self.how.warmup_steps
        return local > 0 and local % self.how.sync_every == 0

    def after_update(self, weights: Sequence[Array], state: Mapping[str, Array]) -> bool:
        average_(self.site.group, weights, f"{self.site.name} weights")
        self.sent += of_allreduce(self.site.group, [*weights, *state.values()])
        if self.how.wants_state:
            average_known_(self.site.group, state, f"{self.site.name} state")
        return True

    def start_over(self, step: int) -> None:
        self.step = step

    def state(self) -> dict[str, Array]:
        return {"step": np.array(self.step)}

    def load(self, state: Mapping[str, Array]) -> None:
        self.step = int(state["step"].item())
