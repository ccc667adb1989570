"""`Column`: the messages of a compressor between one driver of each host, and a count of their bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.algorithms import by_messages
from hvdlite.algorithms.choice import across
from hvdlite.algorithms.movement import allgather, alltoall
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.memory.workspace import Workspace
from hvdlite.transports import Transport
from hvdlite.transports.counted import Counted


class Column:
    """One driver of each host. All methods are collective over them.

    Attributes:
        transport: The transport, which counts the bytes that this rank sends.
        rank: The number of this rank's host.
        size: The number of hosts.
        workspace: Scratch memory for `sum`.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = Counted(transport)
        self.rank, self.size = transport.rank, transport.size
        self.workspace = Workspace()

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return self.transport.sent_bytes

    def sum(self, values: Array) -> None:
        """Add up flat arrays over the hosts, in place. The same bits on all hosts. Price: 2n(h-1)/h elements sent."""
        if self.size > 1 and values.size:
            name = across(self.size, values.nbytes, values.dtype)
            by_messages(name, self.transport, self.workspace, values, Reduction())()

    def gather(self, mine: Array) -> np.ndarray:
        """Every host's array of this length, as rows of a new array in host order. Price: n(h-1) elements sent."""
        rows: np.ndarray = np.empty((self.size, mine.size), mine.dtype)
        rows[self.rank] = mine
        allgather(self.transport, [rows[host] for host in range(self.size)])
        return rows

    def deliver(self, outgoing: Sequence[Array]) -> list[np.ndarray]:
        """Send one flat array to each host, and return what each host has sent here. Lengths may differ.

        Price: each array once, its own part excepted; and one small message per host for the lengths.

        Args:
            outgoing: For each host an array of one dtype, equal on all hosts.
        """
        lengths = self.gather(np.array([len(each) for each in outgoing], np.int64))
        own = outgoing[self.rank]
        incoming = [np.empty(int(lengths[host, self.rank]), own.dtype) for host in range(self.size)]
        alltoall(self.transport, outgoing, incoming)
        return incoming

    def any(self, here: bool) -> bool:
        """Whether this is true on any host. Price: 8 bytes per step of an all-reduce."""
        flag = np.array([here], np.int64)
        self.sum(flag)
        return bool(flag[0])
