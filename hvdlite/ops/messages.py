"""Messages from one rank to another. Each message carries its shape and dtype, which the receiver need not know."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hvdlite.algorithms import label
from hvdlite.arrays import Array
from hvdlite.gpu_streams import on_host
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.common import describe


@dataclass(frozen=True)
class Letter:
    """One message, as both sides know it.

    Attributes:
        group: The process set.
        source: The sender's place in the group.
        dest: The receiver's place in the group.
        name: Equal on both sides.
        kind: What messages call it.
    """

    group: Group
    source: int
    dest: int
    name: str
    kind: str = "message"

    def answer(self, kind: str) -> Letter:
        """Return the message that goes back to the sender.

        It has another name than this message, because the next message of this name may be under way.
        """
        return replace(self, source=self.dest, dest=self.source, kind=kind, name=f"{self.name}, back")

    def send(self, array: Array, note: int = 0) -> None:
        """Send an array, and wait until it is received. The receiver also gets `note`."""
        self.lane_to(self.dest).run(self.sending(array, note))

    def start_send(self, array: Array) -> Handle[None]:
        """Start to send an array. The array must not change before the handle is done."""
        return self.lane_to(self.dest).submit(self.sending(array, 0))

    def receive(self) -> tuple[Array, int]:
        """Wait for the message. Returns a new array on the host, and the sender's note."""
        return self.lane_to(self.source).run(self.receiving())

    def start_receive(self) -> Handle[tuple[Array, int]]:
        """As `receive`, but return a handle at once."""
        return self.lane_to(self.source).submit(self.receiving())

    def lane_to(self, place: int) -> Lane:
        """Return the lane between this rank and another member."""
        return self.group.post.lane(place)

    def sending(self, array: Array, note: int) -> Request[None]:
        """Make the sender's request."""
        array = on_host(array)
        header = label.encode(array.shape, array.dtype, note)

        def work(at: Workplace) -> None:
            at.transport.send(header, self.dest)
            at.transport.send(array, self.dest)

        return Request(Signature(self.kind, self.name), work)

    def receiving(self) -> Request[tuple[Array, int]]:
        """Make the receiver's request."""
        return Request(Signature(self.kind, self.name), lambda at: label.receive(at.transport, self.source))


def letter_to(dest: int, name: str | None, process_set: ProcessSet | None) -> Letter:
    """Return the next message from this rank to another.

    Args:
        dest: The receiver's global rank.
        name: Equal on both sides. None: messages in each direction are numbered.
        process_set: Both ranks are its members. None: all ranks.

    Raises:
        ValueError: `dest` is no member, or is this rank.
    """
    group = runtime.group_of(process_set)
    place = other(group, "send", dest)
    return Letter(group, group.rank, place, group.post.name(group.rank, place, name))


def letter_from(source: int, name: str | None, process_set: ProcessSet | None) -> Letter:
    """Return the next message from the global rank `source` to this one. Otherwise as `letter_to`."""
    group = runtime.group_of(process_set)
    place = other(group, "recv", source)
    return Letter(group, place, group.rank, group.post.name(place, group.rank, name))


def other(group: Group, kind: str, rank: int) -> int:
    """Return another rank's place in the group. Raises ValueError if that rank is no member, or is this rank."""
    if rank not in group.ranks:
        raise ValueError(f"{kind}: rank {rank} is not one of the ranks {describe(group)}")
    if group.ranks.index(rank) == group.rank:
        raise ValueError(f"{kind}: rank {rank} is this rank itself")
    return group.ranks.index(rank)
