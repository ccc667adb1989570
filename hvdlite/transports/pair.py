"""Two ranks of a transport as a transport of their own.

Its messages are point-to-point and separate from the parent's (`Transport.aside`). So two ranks can begin at any time.
To make an MPI communicator for two, one rank would have to wait for the other.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from hvdlite.arrays import Array
from hvdlite.transports import Transport


class PairMaximum:
    """A Maximum of two ranks: they exchange their values."""

    def __init__(self, parent: Transport, peer: int, count: int) -> None:
        self.parent, self.peer = parent, peer
        self.mine, self.theirs = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.values: Sequence[int] = ()

    def start(self, values: Sequence[int]) -> bool:
        self.mine[:] = values
        self.exchange = self.parent.start_exchange(self.mine, self.peer, self.theirs, self.peer)
        return False

    def test(self) -> bool:
        if not self.exchange.test():
            return False
        self.values = list(map(max, self.mine.tolist(), self.theirs.tolist()))
        return True


class PairTransport:
    """A Transport of this rank and `peer` of `parent`, for messages only. The lower rank is rank 0. Does not own the
    parent.
    """

    size = 2

    def __init__(self, parent: Transport, peer: int) -> None:
        self.parent, self.peer = parent, peer
        self.rank = int(parent.rank > peer)
        self.library = parent.library

    def no_collective(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("a pair of ranks has messages, and no collectives")

    exchange = prepared_exchange = start_exchange = barrier = share = native_allreduce = split = no_collective

    def send(self, array: Array, dest: int) -> None:
        self.parent.send(array, self.peer)

    def receive(self, array: Array, source: int) -> None:
        self.parent.receive(array, self.peer)

    def maximum(self, count: int) -> PairMaximum:
        return PairMaximum(self.parent, self.peer, count)

    def allgather_object(self, value: Any) -> list[Any]:
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        length = np.empty(1, np.int64)
        self.parent.exchange(np.array([mine.size]), self.peer, length, self.peer)
        theirs = np.empty(int(length[0]), np.uint8)
        self.parent.exchange(mine, self.peer, theirs, self.peer)
        other = pickle.loads(theirs.tobytes())
        return [other, value] if self.rank else [value, other]

    def close(self) -> None:
        pass
