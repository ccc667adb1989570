"""Decentralized averaging: each rank combines its weights with its neighbours', and waits for these alone.

There are two modes. W is the topology's matrix, x_i rank i's weights, lr g the change that the optimizer makes:

    combine-then-adapt    x_i <- sum over j of W[i, j] x_j - lr g(x_i)        D-PSGD (Lian et al. 2017)
    adapt-then-combine    x_i <- sum over j of W[i, j] (x_j - lr g(x_j))      (Chen & Sayed 2012)

In the first, neighbours exchange weights while the ranks compute gradients, so the exchange may cost no time. In the
second, ranks wait for the exchange after each update, and stay closer together. Per update a rank sends its weights
once to each out-neighbour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdlite.arrays import Array
from hvdlite.lanes.calls import calling
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.ops.neighbors import Combining, Part, overwrite
from hvdlite.strategies import Running, Site, Strategy
from hvdlite.strategies.topology import OnePeerExponential, Topology, require_doubly_stochastic
from hvdlite.strategies.traffic import abroad

COMBINE_FIRST, ADAPT_FIRST = "combine-then-adapt", "adapt-then-combine"


@dataclass(frozen=True, repr=False)
class Neighbors(Strategy):
    """Each rank averages weights with its neighbours, in every update.

    Attributes:
        topology: A function of the number of ranks (`hvd.RingGraph`), a `Topology`, a doubly stochastic matrix, or
            `hvd.OnePeerExponential()`.
        mode: "combine-then-adapt" (D-PSGD) or "adapt-then-combine".
    """

    topology: object
    mode: str = field(default=COMBINE_FIRST, kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in (COMBINE_FIRST, ADAPT_FIRST):
            raise ValueError(f"mode={self.mode!r} must be {COMBINE_FIRST!r} or {ADAPT_FIRST!r}")

    def __repr__(self) -> str:
        said = self.topology
        if callable(said):
            said = getattr(said, "__name__", "a function")
        elif not isinstance(said, (Topology, OnePeerExponential)):
            said = Topology.of(said)
        return f"Neighbors({said}, mode={self.mode!r})"

    @property
    def joins(self) -> bool:
        return False

    def start(self, site: Site) -> Running:
        """Begin to work for one optimizer. Collective; waits for all ranks.

        Args:
            site: The optimizer.

        Returns:
            The strategy at work.

        Raises:
            ValueError: The topology is not doubly stochastic, not connected, or for another number of ranks.
            MismatchError: The ranks' topologies or modes differ. Every rank raises it.
        """
        rounds = rounds_of(self.topology, site.group.size)
        facts = (("topology", tuple(each.digest for each in rounds)), ("mode", self.mode))
        with calling(f"strategy=hvd.Neighbors(...) of {site.title}"):
            site.group.eager.run(Request(Signature("topology", site.name, facts), lambda at: None))
        return CombineFirst(site, rounds) if self.mode == COMBINE_FIRST else AdaptFirst(site, rounds)


def rounds_of(wanted: object, size: int) -> list[Topology]:
    """Return the topologies of one period.

    Args:
        wanted: As for `Neighbors`.
        size: The number of ranks.

    Raises:
        ValueError: They are not doubly stochastic, not connected, or for another number of ranks.
    """
    if isinstance(wanted, OnePeerExponential):
        rounds = wanted.rounds(size)
    else:
        found = wanted(size) if callable(wanted) else wanted
        rounds = [found if isinstance(found, Topology) else Topology.of(found)]
    for topology in rounds:
        if topology.size != size:
            raise ValueError(f"the topology is for {topology.size} ranks, and {size} ranks train together")
    require_doubly_stochastic(rounds)
    return rounds


class Combiner(Running):
    """What both modes share: rounds, one after another.

    Attributes:
        site: The optimizer.
        parts: For each topology of the period what this rank does, and the topology's digest.
        round: The number of rounds that have ended. It chooses the topology.
        serial: The number of rounds that were begun. It names the messages.
        sent: The bytes of weights that this rank has sent to ranks of other hosts.
        under_way: The round under way, if any.
    """

    def __init__(self, site: Site, rounds: Sequence[Topology]) -> None:
        self.site = site
        rank = site.group.rank
        self.parts = [
            (
                Part(each.self_weight(rank), each.weights(rank), dict.fromkeys(each.out_neighbors(rank), 1.0)),
                each.digest,
            )
            for each in rounds
        ]
        self.round = self.serial = 0
        self.sent = 0.0
        self.under_way: Combining | None = None

    @property
    def alone(self) -> bool:
        """Whether there is no other rank."""
        return self.site.group.size == 1

    def begin(self, weights: Sequence[Array], waits: bool) -> Combining:
        """Begin a round with copies of the weights. waits: as for `Combining.start`."""
        part, digest = self.parts[self.round % len(self.parts)]
        found = Combining(self.site.group, part, weights)
        self.serial += 1
        with calling(f"the weights' exchange between neighbours of {self.site.title}"):
            name = f"{self.site.name} {self.serial}"
            found.start("neighbors", name, (("topology", digest),), waits)
        self.sent += len(abroad(self.site.group, part.dests)) * sum(each.nbytes for each in weights)
        return found

    def finish(self, combining: Combining, weights: Sequence[Array]) -> None:
        """Wait for the neighbours, and overwrite the weights with the combination."""
        for array, values in zip(weights, combining.wait(), strict=True):
            overwrite(array, values)
        self.round += 1

    @property
    def sent_bytes(self) -> float:
        return self.sent

    def moved(self) -> None:
        self.under_way = None

    def state(self) -> dict[str, Array]:
        return {"round": np.array(self.round)}

    def load(self, state: Mapping[str, Array]) -> None:
        self.round = int(state["round"].item())
        self.under_way = None


class CombineFirst(Combiner):
    """D-PSGD: the exchange of x_k begins after update k - 1, and its result replaces the weights before update k."""

    def update_begins(self) -> bool:
        return not self.alone

    def before_update(self, weights: Sequence[Array], gradients: Sequence[Array | None]) -> None:
        combining, self.under_way = self.under_way, None
        self.finish(combining or self.begin(weights, True), weights)

    def update_ends(self) -> bool:
        return not self.alone

    def after_update(self, weights: Sequence[Array], state: Mapping[str, Array]) -> bool:
        self.under_way = self.begin(weights, False)
        return False

    def settle(self, weights: Sequence[Array]) -> None:
        """Wait until no message is under way. The weights stay: the next update exchanges them anew."""
        combining, self.under_way = self.under_way, None
        if combining is not None:
            combining.wait()


class AdaptFirst(Combiner):
    """Adapt-then-combine: the exchange follows each update, which waits for it."""

    def update_ends(self) -> bool:
        return not self.alone

    def after_update(self, weights: Sequence[Array], state: Mapping[str, Array]) -> bool:
        self.finish(self.begin(weights, True), weights)
        return False
