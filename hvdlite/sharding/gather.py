"""Gives every rank the pieces of parameters that other ranks have stepped: all-gathers, by messages.

    rank 0's pieces     w1, the first part of w3; b1 and b2 packed
    rank 1's pieces     the rest of w3, w4; b3 and b4 packed

Large pieces travel from the owner's parameter into the others' parameters, without copies: on one host to each rank,
AT_ONCE at a time, so that a rank that is held up for a moment does not stop the others; over a network along a ring,
which crosses to each host once. Small pieces are packed. Price: n(p-1)/p bytes sent per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

from hvdlite.algorithms import movement
from hvdlite.arrays import Array, is_host, split_rows
from hvdlite.lanes.gpu_side import on_gpu
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.sharding.cuts import Cuts
from hvdlite.transports import Exchange, Transport

LARGE = 64 * 1024
"""Pieces of this many bytes travel alone."""
AT_ONCE = 16
"""The most messages under way to other ranks of the host."""
LONGEST = 4 << 20
"""The most bytes of a message."""


@dataclass(frozen=True)
class Span:
    """The bytes, from and to, of a parameter."""

    index: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Their number."""
        return self.stop - self.start


Message: TypeAlias = list[Span]


class Gather:
    """The messages of all ranks.

    Attributes:
        packed: Each rank's messages of small pieces, in their order.
        large: Each rank's large pieces, in their order.
    """

    def __init__(self, cuts: Cuts, itemsizes: Sequence[int], size: int) -> None:
        """
        Args:
            cuts: The pieces.
            itemsizes: The bytes of one element of each parameter.
            size: The number of ranks.
        """
        everyone = [_spans(cuts, itemsizes, rank) for rank in range(size)]
        self.packed = [packed(span for span in spans if span.nbytes < LARGE) for spans in everyone]
        self.large = [divided(span for span in spans if span.nbytes >= LARGE) for spans in everyone]

    def request(self, lane: Lane, memory: Sequence[Array], signature: Signature, flag: int = 0) -> Request[None]:
        """Return the request in which all ranks get all pieces: no rank gets any if one has a flag.

        Args:
            lane: The lane that the request is for.
            memory: The bytes of each parameter, on the host or on one GPU.
            signature: See `signature_of`.
            flag: This rank's; other than 0 if it has no pieces to give.
        """

        def work(at: Workplace) -> None:
            if not made.flag:
                self.run(at, memory)

        made = Request(signature, work, flag=flag)
        if memory and not is_host(memory[0]):
            on_gpu(lane, made, memory[0])
        return made

    def run(self, at: Workplace, memory: Sequence[Array]) -> None:
        """Overwrite the pieces of other ranks with theirs. Collective; runs on the lane.

        Args:
            at: The workplace.
            memory: The bytes of each parameter.
        """
        if not memory:  # all parameters are frozen so far
            return
        mine, size = at.transport.rank, at.transport.size
        rooms = split_rows(at.workspace.scratch(memory[0], size * LARGE), [LARGE] * size)
        for together in zip_longest(*self.packed, fillvalue=[]):
            places = [room[: sum(span.nbytes for span in its)] for its, room in zip(together, rooms, strict=True)]
            for piece, place in _copies(together[mine], memory, places[mine]):
                place[...] = piece
            movement.allgather(at.transport, places)
            for rank, its in enumerate(together):
                for piece, place in _copies(its, memory, places[rank]) if rank != mine else ():
                    piece[...] = place
        pieces = [[memory[span.index][span.start : span.stop] for span in spans] for spans in self.large]
        if at.place.one_host and is_host(memory[0]):
            exchange_directly(at.transport, pieces, memory[0][:0])
        else:
            for along in zip_longest(*pieces, fillvalue=memory[0][:0]):
                movement.allgather(at.transport, along)


def signature_of(optimizer: str, lines: Sequence[str], round: Round) -> Signature:
    """Return what ranks compare before they give each other pieces.

    Args:
        optimizer: The name of the optimizer's rounds.
        lines: The parameters as text.
        round: The name of the step.
    """
    # The name of a round's first bucket: if another rank leaves the step out, all ranks raise MismatchError.
    return Signature("stepped", f"{optimizer} bucket 0", (("parameters", tuple(lines)),), round)


def exchange_directly(transport: Transport, pieces: Sequence[Sequence[Array]], nothing: Array) -> None:
    """Send this rank's pieces to each other rank, and receive theirs. Collective.

    Args:
        transport: The ranks.
        pieces: Each rank's, equally long on all ranks. This rank's own are read, and the others are overwritten.
        nothing: An empty array.
    """
    rank, size, many = transport.rank, transport.size, max(map(len, pieces))
    padded = [[*its, *[nothing] * (many - len(its))] for its in pieces]
    under_way: deque[Exchange] = deque()
    for step in range(1, size):
        dest, source = (rank + step) % size, (rank - step) % size
        for outgoing, incoming in zip(padded[rank], padded[source], strict=True):
            if len(under_way) == AT_ONCE:
                under_way.popleft().wait()
            under_way.append(transport.start_exchange(outgoing, dest, incoming, source))
    for exchange in under_way:
        exchange.wait()


def packed(spans: Iterable[Span]) -> list[Message]:
    """Put small pieces together, in messages of at most LARGE bytes."""
    found: list[Message] = []
    room = 0  # in the last message
    for span in spans:
        if span.nbytes > room:
            found.append([])
            room = LARGE
        found[-1].append(span)
        room -= span.nbytes
    return found


def divided(spans: Iterable[Span]) -> list[Span]:
    """Divide large pieces into such of at most LONGEST bytes."""
    return [
        Span(span.index, start, min(start + LONGEST, span.stop))
        for span in spans for start in range(span.start, span.stop, LONGEST)
    ]  # fmt: skip


def _spans(cuts: Cuts, itemsizes: Sequence[int], rank: int) -> list[Span]:
    """The bytes that a rank owns, without empty pieces."""
    found = []
    for index, itemsize in enumerate(itemsizes):
        start, stop = cuts.piece(index, rank)
        if start < stop:
            found.append(Span(index, start * itemsize, stop * itemsize))
    return found


def _copies(message: Message, memory: Sequence[Array], packed: Array) -> Iterator[tuple[Array, Array]]:
    """Each piece of a message in its parameter's memory, and its place in the packed message."""
    pieces = [memory[span.index][span.start : span.stop] for span in message]
    return zip(pieces, split_rows(packed, [span.nbytes for span in message]), strict=True)
