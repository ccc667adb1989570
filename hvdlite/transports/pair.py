"""A transport of two ranks of a process set: for `hvd.send`, `hvd.recv`, and neighbours (`lanes.pair_lanes`).

Each rank makes its own end, at any time. An end sends over a parent transport, which `Communicator.aside` has made. The
transport has only send, receive, exchange, maximum and allgather_object. Rejected: an MPI communicator of two, because
one rank would have to wait for the other to make it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from hvdlite.arrays import Array
from hvdlite.transports import T, Transport
from hvdlite.transports.sent_bytes import Tally


class PairMaximum:
    """A Maximum of two ranks, which exchange their values."""

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
    """A Transport of this rank and rank `peer` of `parent`. The lower of the two is rank 0. It does not own `parent`.

    It has `send`, `receive`, `exchange`, `maximum` and `allgather_object`, and no other operations.

    Args:
        parent: The transport that sends.
        peer: A rank of `parent`.
        tally: Counts what this rank sends, for the ranks of `parent`. Agreements are not counted.
    """

    size = 2

    def __init__(self, parent: Transport, peer: int, tally: Tally) -> None:
        self.parent, self.peer = parent, peer
        self.rank = int(parent.rank > peer)
        self.library = parent.library
        self.tally = tally.of(sorted((parent.rank, peer)))

    def no_collective(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError("a pair of ranks has only send, receive, exchange, maximum and allgather_object")

    prepared_exchange = no_collective
    start_exchange = no_collective
    barrier = no_collective
    share = no_collective
    native_allreduce = no_collective
    split = no_collective

    def send(self, array: Array, dest: int) -> None:
        self.tally.to(1 - self.rank, array.nbytes)
        self.parent.send(array, self.peer)

    def receive(self, array: Array, source: int) -> None:
        self.parent.receive(array, self.peer)

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        self.tally.to(1 - self.rank, send.nbytes)
        self.parent.start_exchange(send, self.peer, receive, self.peer).wait()

    def maximum(self, count: int) -> PairMaximum:
        return PairMaximum(self.parent, self.peer, count)

    def allgather_object(self, value: T) -> list[T]:
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        length = np.empty(1, np.int64)
        self.parent.exchange(np.array([mine.size]), self.peer, length, self.peer)
        theirs = np.empty(int(length[0]), np.uint8)
        self.parent.exchange(mine, self.peer, theirs, self.peer)
        other = pickle.loads(theirs.tobytes())
        return [other, value] if self.rank else [value, other]

    def close(self) -> None:
        pass
