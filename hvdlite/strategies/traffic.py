"""The bytes that strategies send to other hosts. Ranks of one host exchange weights in memory."""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite.arrays import Array
from hvdlite.job.groups import Group


def of_allreduce(group: Group, arrays: Iterable[Array]) -> float:
    """Return the bytes that this rank sends to other hosts for an all-reduce of these arrays, as a mean over ranks."""
    hosts = group.eager.place.hosts
    drivers = min(map(len, hosts), default=1)
    return 2 * (1 - 1 / max(len(hosts), 1)) / drivers * sum(array.nbytes for array in arrays)


def abroad(group: Group, ranks: Iterable[int]) -> list[int]:
    """Return those of a group's ranks that are on other hosts than this one."""
    home = next((host for host in group.eager.place.hosts if group.rank in host), range(group.size))
    return [rank for rank in ranks if rank not in home]
