"""Gives every rank the pieces of parameters that other ranks have stepped: all-gathers, by messages.

    rank 0's messages     [ w1          ] [ b1 and the first part of w2 ]
    rank 1's messages     [ the rest of w2 ] [ b2 ]

Large pieces travel from the owner's parameter into the others' parameters, without copies. Small ones are packed.
Price: n(p-1)/p bytes sent per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeAlias

from hvdlite.algorithms import movement
from hvdlite.arrays import Array, module, split_rows
from hvdlite.lanes.workplace import Workplace
from hvdlite.sharding.cuts import Cuts

LARGE = 64 * 1024
"""Pieces of this many bytes travel alone."""
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
    """The messages of all ranks, and memory to pack small pieces in.

    Attributes:
        messages: Each rank's messages, in their order.
        scratch: For each rank LARGE bytes; None before the first gather.
    """

    def __init__(self, cuts: Cuts, itemsizes: Sequence[int], size: int) -> None:
        """
        Args:
            cuts: The pieces.
            itemsizes: The bytes of one element of each parameter.
            size: The number of ranks.
        """
        self.messages = [messages(_spans(cuts, itemsizes, rank)) for rank in range(size)]
        self.scratch: list[Array] | None = None

    def run(self, at: Workplace, memory: Sequence[Array]) -> None:
        """Overwrite the pieces of other ranks with theirs. Collective; runs on the lane.

        Args:
            at: The workplace.
            memory: The bytes of each parameter.
        """
        if not memory:  # all parameters are frozen so far
            return
        if self.scratch is None:
            self.scratch = [module(memory[0]).empty(LARGE, "uint8") for _ in self.messages]
        mine = at.transport.rank
        for together in zip_longest(*self.messages, fillvalue=[]):
            places = [_place(message, memory, room) for message, room in zip(together, self.scratch, strict=True)]
            if len(together[mine]) > 1:
                for piece, place in _copies(together[mine], memory, places[mine]):
                    place[...] = piece
            movement.allgather(at.transport, places)
            for rank, message in enumerate(together):
                if rank != mine and len(message) > 1:
                    for piece, place in _copies(message, memory, places[rank]):
                        piece[...] = place


def messages(spans: Sequence[Span]) -> list[Message]:
    """Divide one rank's pieces into messages: large ones are divided, small ones are put together."""
    found: list[Message] = []
    room = 0  # in the last message, if it is of small pieces
    for span in spans:
        if span.nbytes >= LARGE:
            starts = range(span.start, span.stop, LONGEST)
            found += [[Span(span.index, start, min(start + LONGEST, span.stop))] for start in starts]
            room = 0
            continue
        if span.nbytes > room:
            found.append([])
            room = LARGE
        found[-1].append(span)
        room -= span.nbytes
    return found


def _spans(cuts: Cuts, itemsizes: Sequence[int], rank: int) -> list[Span]:
    """The bytes that a rank owns, without empty pieces."""
    found = []
    for index, itemsize in enumerate(itemsizes):
        start, stop = cuts.piece(index, rank)
        if start < stop:
            found.append(Span(index, start * itemsize, stop * itemsize))
    return found


def _place(message: Message, memory: Sequence[Array], room: Array) -> Array:
    """The memory that a message is sent from, and received in: that of the only piece, or `room`."""
    if len(message) == 1:
        (span,) = message
        return memory[span.index][span.start : span.stop]  # type: ignore[no-any-return]
    return room[: sum(span.nbytes for span in message)]  # type: ignore[no-any-return]


def _copies(message: Message, memory: Sequence[Array], packed: Array) -> Iterator[tuple[Array, Array]]:
    """Each piece of a message in its parameter's memory, and its place in the packed message."""
    pieces = [memory[span.index][span.start : span.stop] for span in message]
    return zip(pieces, split_rows(packed, [span.nbytes for span in message]), strict=True)
