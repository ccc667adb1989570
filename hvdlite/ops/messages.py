"""Messages from one rank to another. The receiver learns shape and dtype from the message."""

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
    """One message, as both sides know it: from one place of a group to another, under one name."""

    group: Group
    source: int
    dest: int
    name: str
    kind: str = "message"

    def answer(self, kind: str) -> Letter:
        """Another message, that goes back and belongs to this one; under a name of its own, for the next one of this
        name may be under way."""
        return replace(self, source=self.dest, dest=self.source, kind=kind, name=f"{self.name}, back")

    def send(self, array: Array, note: int = 0) -> None:
        """Send the array and wait until it is received. note: a number that the receiver is given."""
        self.lane_to(self.dest).run(self.sending(array, note))

    def start_send(self, array: Array) -> Handle[None]:
        """Start to send the array, which must not change before the handle is done."""
        return self.lane_to(self.dest).submit(self.sending(array, 0))

    def receive(self) -> tuple[Array, int]:
        """Wait for the array, a new one on the host, and the note."""
        return self.lane_to(self.source).run(self.receiving())

    def start_receive(self) -> Handle[tuple[Array, int]]:
        """`receive`, without waiting."""
        return self.lane_to(self.source).submit(self.receiving())

    def lane_to(self, place: int) -> Lane:
        return self.group.post.lane(place)

    def sending(self, array: Array, note: int) -> Request[None]:
        array = on_host(array)
        header = label.encode(array.shape, array.dtype, note)

        def work(at: Workplace) -> None:
            at.transport.send(header, self.dest)
            at.transport.send(array, self.dest)

        return Request(Signature(self.kind, self.name), work)

    def receiving(self) -> Request[tuple[Array, int]]:
        return Request(Signature(self.kind, self.name), lambda at: label.receive(at.transport, self.source))


def letter_to(dest: int, name: str | None, process_set: ProcessSet | None) -> Letter:
    """A message to another rank.

    dest: a global rank. name: equal on both sides; without one, messages each way are numbered. Raises ValueError for
    a rank that is no member, or this one.
    """
    group = runtime.group_of(process_set)
    place = other(group, "send", dest)
    return Letter(group, group.rank, place, group.post.name(group.rank, place, name))


def letter_from(source: int, name: str | None, process_set: ProcessSet | None) -> Letter:
    """A message from another rank. Arguments as for `letter_to`."""
    group = runtime.group_of(process_set)
    place = other(group, "recv", source)
    return Letter(group, place, group.rank, group.post.name(place, group.rank, name))


def other(group: Group, kind: str, rank: int) -> int:
    """The place in the group of another rank. Raises ValueError where it is no member, or this one."""
    if rank not in group.ranks:
        raise ValueError(f"{kind}: rank {rank} is not one of the ranks {describe(group)}")
    if group.ranks.index(rank) == group.rank:
        raise ValueError(f"{kind}: rank {rank} is this rank itself")
    return group.ranks.index(rank)
