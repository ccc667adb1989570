"""The hosts of all ranks.

The facts come from the communicator (`Split_type(SHARED)` gives each rank the ranks of its host), and not from the
environment. All functions here are pure functions of one list, so that all ranks compute equal results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The hosts, as one rank sees them.

    Attributes:
        rank: This rank.
        size: The number of ranks.
        hosts: The ranks of each host, ascending. Hosts are in the order of their lowest ranks.
    """

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
        """The ranks of all hosts with this rank's local rank, ascending."""
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
    """The topology in which ranks with equal leaders are on one host.

    Args:
        rank: This rank.
        leaders: For each rank a number that is the same for all ranks of a host, and differs between hosts.
    """
    hosts: dict[int, list[int]] = {}
    for member, leader in enumerate(leaders):
        hosts.setdefault(leader, []).append(member)
    return Topology(rank, len(leaders), tuple(tuple(ranks) for ranks in hosts.values()))
