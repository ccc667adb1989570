"""Two ranks of a transport as a transport of their own, which needs no one else to come into being.

Its messages travel beside the parent's (`Transport.aside`) and are all point-to-point, so that two ranks may begin to
talk at any time, which making a communicator for two does not allow: MPI would wait for the other.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from hvdlite.arrays import NOTHING_PENDING, Array, Mark
from hvdlite.transports import Exchange, Transport


class PairMaximum:
    """A Maximum of two: both ranks' values are exchanged."""

    def __init__(self, pair: PairTransport, count: int) -> None:
        self.pair, self.mine, self.theirs = pair, np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.values: Sequence[int] = ()

    def start(self, values: Sequence[int]) -> None:
        self.mine[:] = values
        self.exchange = self.pair.start_exchange(self.mine, self.pair.peer, self.theirs, self.pair.peer)

    def test(self) -> bool:
        if not self.exchange.test():
            return False
        self.values = list(map(max, self.mine.tolist(), self.theirs.tolist()))
        return True


class PairTransport:
    """A Transport of this rank and `peer` of `parent`. The lower of the two is rank 0. Does not own the parent."""

    size = 2

    def __init__(self, parent: Transport, peer: int) -> None:
        self.parent, self.peer = parent, peer
        self.rank = int(parent.rank > peer)
        self.library = parent.library

    def exchange(self, send: Array, dest: int, receive: Array, source: int) -> None:
        self.parent.exchange(send, self.peer, receive, self.peer)

    def prepared_exchange(self, send: Array, dest: int, receive: Array, source: int) -> Callable[[], None]:
        return partial(self.exchange, send, dest, receive, source)

    def start_exchange(
        self, send: Array, dest: int, receive: Array, source: int, after: Mark = NOTHING_PENDING
    ) -> Exchange:
        return self.parent.start_exchange(send, self.peer, receive, self.peer, after)

    def send(self, array: Array, dest: int) -> None:
        self.parent.send(array, self.peer)

    def receive(self, array: Array, source: int) -> None:
        self.parent.receive(array, self.peer)

    def barrier(self) -> None:
        self.allgather_object(None)

    def maximum(self, count: int) -> PairMaximum:
        return PairMaximum(self, count)

    def allgather_object(self, value: Any) -> list[Any]:
        mine = np.frombuffer(pickle.dumps(value), np.uint8)
        length = np.empty(1, np.int64)
        self.parent.exchange(np.array([mine.size]), self.peer, length, self.peer)
        theirs = np.empty(int(length[0]), np.uint8)
        self.parent.exchange(mine, self.peer, theirs, self.peer)
        other = pickle.loads(theirs.tobytes())
        return [other, value] if self.rank else [value, other]

    def native_allreduce(self, array: Array, op: str) -> NoReturn:
        raise NotImplementedError("a pair has no native all-reduce")

    def split(self, *_: Any) -> NoReturn:
        raise NotImplementedError("a pair cannot be split")

    def close(self) -> None:
        pass
