"""Messages from one rank to another. The receiver learns shape and dtype from the message."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdlite import runtime
from hvdlite.algorithms import label
from hvdlite.arrays import NOTHING_PENDING, Array, on_host
from hvdlite.engine import Lane
from hvdlite.groups import Group
from hvdlite.ops.common import describe
from hvdlite.process_sets import ProcessSet


def send(
    array: Array, dest: int, name: str | None = None, process_set: ProcessSet | None = None, wait: bool = True
) -> Any:
    """Send an array of any shape and dtype to a rank that calls `receive`; waits until it has (or returns a Handle).

    dest: a global rank. name: equal on both sides; without one, messages each way are numbered. Two ranks that both
    send first and receive afterwards wait for each other for ever: let one of them use wait=False. Raises ValueError
    for a rank that is no member, or this one; ShutdownError where the other has shut down.
    """
    group = runtime.group_of(process_set)
    place = other(group, "send", dest)
    array = on_host(array)
    header = label.encode(array.shape, array.dtype)

    def work(lane: Lane) -> None:
        lane.transport.send(header, place)
        lane.transport.send(array, place)

    return group.post.submit(group.rank, place, name, work, NOTHING_PENDING, wait)


def receive(source: int, name: str | None = None, process_set: ProcessSet | None = None, wait: bool = True) -> Any:
    """The array that global rank `source` sends here, as a new array on the host. Arguments as for `send`."""
    group = runtime.group_of(process_set)
    place = other(group, "recv", source)

    def work(lane: Lane) -> Array:
        result = np.empty(*label.receive(lane.transport, place))
        lane.transport.receive(result, place)
        return result

    return group.post.submit(place, group.rank, name, work, NOTHING_PENDING, wait)


def other(group: Group, kind: str, rank: int) -> int:
    """The place in the group of another rank. Raises ValueError where it is no member, or this one."""
    if rank not in group.ranks:
        raise ValueError(f"{kind}: rank {rank} is not one of the ranks {describe(group)}")
    if group.ranks.index(rank) == group.rank:
        raise ValueError(f"{kind}: rank {rank} is this rank itself")
    return group.ranks.index(rank)
