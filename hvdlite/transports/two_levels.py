"""The two levels of a job on several hosts: the ranks of one host, and columns of one rank per host.

    host A   0 1 2 3
    host B   4 5 6 7
    host C   8 9

The level `local` is a row: its ranks exchange data in memory. The level `cross` is a column of drivers. A driver is a
rank that sends one part of its host's data over the network. Rank k of each host is in column k. Each host has as many
drivers as the smallest host has ranks, so that every column is complete. Here drivers are 0, 1, 4, 5, 8, 9. On one host
there are no drivers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.transports import Transport


@dataclass(frozen=True)
class Levels:
    """The transports of both levels.

    Attributes:
        local: The ranks of this host.
        cross: The drivers in this rank's column, one per host; None if this rank is no driver, and on one host.
        drivers: The number of drivers on each host, its lowest local ranks; 0 on one host.
        fullest: The largest number of ranks on one host.
    """

    local: Transport
    cross: Transport | None
    drivers: int
    fullest: int

    def close(self) -> None:
        """Release the transports that `split` made."""
        if self.drivers:
            self.local.close()
            if self.cross is not None:
                self.cross.close()


def split(transport: Transport, hosts: Sequence[Sequence[int]]) -> Levels:
    """Make both levels. Collective. On one host this makes no new transports. hosts: the transport's ranks by host."""
    if len(hosts) < 2:
        return Levels(transport, None, 0, transport.size)
    number = next(number for number, ranks in enumerate(hosts) if transport.rank in ranks)
    place, drivers = hosts[number].index(transport.rank), min(map(len, hosts))
    local = transport.split(number)
    cross = transport.split(place if place < drivers else None)
    assert local is not None
    return Levels(local, cross, drivers, max(map(len, hosts)))
