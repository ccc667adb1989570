"""Messages between two ranks of a process set: each pair that talks has a lane of its own.

So a message has all that a collective has: a name by which both sides find each other in any order, waiting that
takes no core, handles, and an error where the other has shut down. A pair's lane needs nobody's leave to come into
being, so the peer may not know of it; a rank that shuts down therefore answers who calls it until all have come.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from hvdlite.algorithms import Place
from hvdlite.lanes.calls import UNNAMED
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Observer
from hvdlite.transports import Communicator
from hvdlite.transports.pair import PairTransport


class Post:
    """The pair lanes of one process set on this rank. transport: the set's. members: the set's global ranks.
    observers: of all lanes. family: all lanes, of other sets, too."""

    def __init__(
        self, transport: Communicator, members: Sequence[int], observers: Sequence[Observer],
        family: Callable[[], Iterable[Lane]],
    ) -> None:
        self.transport = transport.aside()
        self.members, self.observers, self.family = members, observers, family
        self.lock = threading.Lock()
        self.lanes: dict[int, Lane] = {}
        """By the peer's place in the set."""
        self.unnamed: dict[tuple[int, int], count[int]] = {}

    def lane(self, peer: int) -> Lane:
        """The lane with this peer, made at the first call. Not collective."""
        with self.lock:
            if peer not in self.lanes:
                pair = PairTransport(self.transport, peer)
                members = [self.members[place] for place in sorted((peer, self.transport.rank))]
                name = f"messages of ranks {list(self.members)}"  # another set's are others, to whoever looks on
                self.lanes[peer] = Lane(pair, Place(2, False), members, name, self.observers, self.family)
            return self.lanes[peer]

    def name(self, source: int, dest: int, name: str | None) -> str:
        """What both sides call a message; those without a name are numbered, each way."""
        if name is None:
            with self.lock:
                name = f"{UNNAMED}{next(self.unnamed.setdefault((source, dest), count(1)))}"
        return f"{name} from rank {self.members[source]} to rank {self.members[dest]}"

    def start_leaving(self) -> None:
        """Tell every peer that this rank has talked to, or that calls it now, that no message follows."""
        for peer in range(self.transport.size):
            known = peer in self.lanes or (peer != self.transport.rank and self.transport.called_by(peer))
            if known and self.lane(peer).closed is None:
                self.lane(peer).start_leaving()

    def leave(self, everyone: Sequence[Sequence[int]]) -> None:
        """Leave all lanes, those that peers have made included. everyone: the peers of each rank's lanes."""
        for peer, known in enumerate(everyone):
            if self.transport.rank in known:
                self.lane(peer)
        self.start_leaving()
        for lane in list(self.lanes.values()):
            lane.leave()
