"""How far a reducer's round has come: which gradients are there, and which buckets have left.

    state         what it means
    fresh         nothing has been marked, and nothing has left
    begun         some gradients are there, and perhaps some buckets have left
    unresolved    between rounds only: a round that was begun has failed, and other ranks may still be in it
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from hvdlite.gradients.plan import BucketPlan
from hvdlite.lanes.request import Handle, Request


class Flag(IntEnum):
    """What a rank says of its round when the last bucket leaves. All ranks learn the largest."""

    COMPLETE = 0
    """Every gradient is there."""
    COMPARE = 1
    """Some are not: the ranks are to compare what each has."""
    VOID = 2
    """And above: a rank's backward has raised. Its number on the lane is added: see `void_of`."""


def void_of(rank: int) -> int:
    """The flag by which a rank says that no rank is to have results."""
    return Flag.VOID + rank


def rank_of(flag: int) -> int | None:
    """The rank on the lane that has voided a round; None: the round has results."""
    return flag - Flag.VOID if flag >= Flag.VOID else None


class Progress:
    """The round under way of one plan. plan: which bucket each gradient lies in."""

    def __init__(self, plan: BucketPlan) -> None:
        self.bucket_of = [slot.bucket for slot in plan.slots]
        self.lengths = [len(bucket.members) for bucket in plan.buckets]
        self.begin()

    def begin(self) -> None:
        """A new round."""
        self.begun = False
        """Whether anything has been marked or has left. Looked at ahead of calls that would find out: each costs some
        3 us where caches are cold."""
        self.marked = bytearray(len(self.bucket_of))
        self.missing = self.lengths.copy()
        self.sent: list[tuple[Request[bool], Handle[bool]]] = []
        self.arrived: list[int] = []

    def start(self) -> None:
        """Something of the round is there, or is about to be: it is to be forgotten if it fails."""
        self.begun = True

    def mark(self, index: int) -> bool:
        """Gradient `index` is there. Returns whether it is for the first time."""
        if self.marked[index]:
            return False
        self.marked[index] = True
        self.missing[self.bucket_of[index]] -= 1
        return True

    def mark_at_end(self, indices: Sequence[int]) -> None:
        """These gradients, each named once, are there, and nothing leaves before the end."""
        self.begun = True  # first: such a round is to be forgotten
        if len(indices) == len(self.marked):
            self.marked = bytearray(b"\1") * len(indices)
        else:
            for index in indices:
                self.marked[index] = True

    def note_arrival(self, index: int) -> None:
        """Remember the order in which gradients come."""
        self.arrived.append(index)

    def note_sent(self, request: Request[bool]) -> None:
        """The next bucket has left."""
        self.sent.append((request, request.handle))

    @property
    def next_is_full(self) -> bool:
        """Whether the next bucket can leave. The last one never leaves early."""
        number = len(self.sent)
        return number < len(self.missing) - 1 and self.missing[number] == 0

    def has_left(self, index: int) -> bool:
        """Whether gradient `index` is on its way to the other ranks."""
        return self.bucket_of[index] < len(self.sent)

    @property
    def unmarked(self) -> list[int]:
        return [index for index, marked in enumerate(self.marked) if not marked]

    @property
    def partly_sent(self) -> bool:
        """Whether some buckets have left, and others have not."""
        return 0 < len(self.sent) < len(self.missing)

    @property
    def handles(self) -> list[Handle[bool]]:
        return [handle for _, handle in self.sent]
