"""Where the ranks are: which of them share a host's memory, and who is whose neighbour.

The facts come from the communicator (`Split_type(SHARED)` gives each rank the list of ranks on its host), never
from environment guesses. Everything here is a pure function of one list, so that all ranks derive the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """One rank's place. `hosts` lists the ranks of each host, ascending, ordered by their lowest rank."""

    rank: int
    size: int
    hosts: tuple[tuple[int, ...], ...]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this rank's host, ascending."""
        return next(ranks for ranks in self.hosts if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.local_ranks.index(self.rank)

    @property
    def local_size(self) -> int:
        return len(self.local_ranks)

    @property
    def cross_ranks(self) -> tuple[int, ...]:
        """The ranks with this local rank on all hosts that have one, by global rank."""
        local = self.local_rank
        return tuple(sorted(ranks[local] for ranks in self.hosts if len(ranks) > local))

    @property
    def cross_rank(self) -> int:
        return self.cross_ranks.index(self.rank)

    @property
    def cross_size(self) -> int:
        return len(self.cross_ranks)

    @property
    def homogeneous(self) -> bool:
        """Whether every host has the same number of ranks."""
        return len({len(ranks) for ranks in self.hosts}) == 1

    @property
    def one_host(self) -> bool:
        return len(self.hosts) == 1


def from_leaders(rank: int, leaders: Sequence[int]) -> Topology:
    """leaders: for each rank, any number that ranks of one host share and ranks of other hosts do not."""
    hosts: dict[int, list[int]] = {}
    for member, leader in enumerate(leaders):  # ascending, so that hosts come in the order of their lowest ranks
        hosts.setdefault(leader, []).append(member)
    return Topology(rank, len(leaders), tuple(tuple(ranks) for ranks in hosts.values()))
