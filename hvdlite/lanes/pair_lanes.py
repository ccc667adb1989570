"""Messages between two ranks of a process set, on a separate lane for each pair.

So messages work like collectives: both ranks match them by name, in any order; they wait without using a core; they
have handles; and they fail if the other rank has shut down. `hvd.send`, `hvd.recv` and exchanges between neighbours use
these lanes. A rank makes its end of a lane at the first message, when the peer may not have called yet. So a rank that
shuts down makes its ends of the lanes that peers wait in, and leaves them. It repeats that until all ranks shut down.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from hvdlite.algorithms import Place
from hvdlite.lanes.calls import UNNAMED, calling
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Observer
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.transports import Communicator
from hvdlite.transports.pair import PairTransport


class Post:
    """The pair lanes of one process set on this rank.

    Args:
        transport: The set's communicator.
        members: The set's global ranks.
        observers: The observers of all lanes.
        family: Returns all lanes of this process, as for `Lane`.
    """

    def __init__(
        self,
        transport: Communicator,
        members: Sequence[int],
        observers: Sequence[Observer],
        family: Callable[[], Iterable[Lane]],
    ) -> None:
        self.transport, self.tally = transport.aside(), transport.tally
        self.members, self.observers, self.family = members, observers, family
        self.lock = threading.Lock()
        self.lanes: dict[int, Lane] = {}
        """This rank's pair lanes, by the peer's rank in the set."""
        self.unnamed: dict[tuple[int, int], count[int]] = {}
        self.sent, self.received = Counter[int](), Counter[int]()
        """The numbers of messages with tags, which use no lane, by the peer's rank in the set."""

    def lane(self, peer: int) -> Lane:
        """The lane with this peer, made at the first call. Not collective."""
        with self.lock:
            if peer not in self.lanes:
                pair = PairTransport(self.transport, peer, self.tally)
                members = [self.members[place] for place in sorted((peer, self.transport.rank))]
                name = f"messages of ranks {list(self.members)}"  # observers know the set by this name
                self.lanes[peer] = Lane(pair, Place(2, False), members, name, self.observers, self.family)
            return self.lanes[peer]

    def show_wait(self, peer: int, title: str) -> Callable[[], object] | None:
        """Let the stall watch see that this rank waits for a peer, in the lane of the two.

        Args:
            peer: The peer's rank in the set.
            title: What this rank waits for.

        Returns:
            A function that ends it; None if the lane is closed, or shows such a wait already.
        """
        lane = self.lane(peer)
        with calling(title):
            request = Request[None](Signature("message", f"{title} of rank {self.transport.rank}"), lambda at: None)
        with lane.queue.changed.lock:
            if lane.closed or request.key in lane.queue.pending:
                return None
            lane.queue.admit(request)
        return lambda: lane.settle(request)

    def count_sent(self, peer: int) -> None:
        """Note a message with a tag to this peer."""
        with self.lock:
            self.sent[peer] += 1

    def count_received(self, peer: int) -> None:
        """Note that a message with a tag has come from this peer."""
        with self.lock:
            self.received[peer] += 1

    def name(self, source: int, dest: int, name: str | None) -> str:
        """The name by which both ranks know a message. Messages without a name are numbered in each direction."""
        if name is None:
            with self.lock:
                name = f"{UNNAMED}{next(self.unnamed.setdefault((source, dest), count(1)))}"
        return f"{name} from rank {self.members[source]} to rank {self.members[dest]}"

    def start_leaving(self) -> None:
        """Begin to leave the lanes with peers, including the lanes that peers alone have made and call on now."""
        for peer in range(self.transport.size):
            known = peer in self.lanes or (peer != self.transport.rank and self.transport.called_by(peer))
            if known and self.lane(peer).closed is None:
                self.lane(peer).start_leaving()

    def leave(self, everyone: Sequence[Sequence[int]]) -> None:
        """Leave all lanes, including those that only peers have made. Collective over the set; waits for all ranks.

        everyone: for each rank, the peers of its lanes.
        """
        for peer, known in enumerate(everyone):
            if self.transport.rank in known:
                self.lane(peer)
        self.start_leaving()
        for lane in list(self.lanes.values()):
            lane.leave()
