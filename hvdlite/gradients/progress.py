"""`Progress`: the record of one round: which gradients are there, and which buckets have left.

A reducer has one `Progress`. Only the reducer calls the methods that change it. `begun` is set before the first
gradient: if the round fails afterwards, the reducer must forget it. `Reducer.unresolved` tells whether other ranks may
still be in a failed round.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from hvdlite.gradients.plan import BucketPlan
from hvdlite.lanes.request import Handle, Request


class Flag(IntEnum):
    """A rank's report on its round, sent with the last bucket. All ranks get the largest flag."""

    COMPLETE = 0
    """Every gradient is there."""
    COMPARE = 1
    """Some gradients are missing: the ranks are to agree on each parameter's `Use`."""
    VOID = 2
    """A rank's backward has raised. The flag is VOID plus that rank's number on the lane: see `void_of`."""


def void_of(rank: int) -> int:
    """The flag with which a rank makes a round void: no rank gets results. rank: its number on the lane."""
    return Flag.VOID + rank


def rank_of(flag: int) -> int | None:
    """The number on the lane of the rank that made a round void; None: the round has results."""
    return flag - Flag.VOID if flag >= Flag.VOID else None


class Progress:
    """The progress of the round under way.

    Attributes:
        bucket_of: The bucket of each gradient.
        lengths: The number of gradients in each bucket.
        begun: Whether a gradient has been marked, or a bucket has left. Callers look at it before a call: with cold
            caches a call costs some 3 us.
        marked: For each gradient, whether it is there.
        missing: For each bucket, the number of gradients that are not there.
        sent: The requests of buckets that have left, in order, with their handles.
        arrived: The gradients in the order in which they came, if the reducer learns that order.
    """

    def __init__(self, plan: BucketPlan) -> None:
        self.bucket_of = [slot.bucket for slot in plan.slots]
        self.lengths = [len(bucket.members) for bucket in plan.buckets]
        self.begin()

    def begin(self) -> None:
        """Forget the last round."""
        self.begun = False
        self.marked = bytearray(len(self.bucket_of))
        self.missing = self.lengths.copy()
        self.sent: list[tuple[Request[bool], Handle[bool]]] = []
        self.arrived: list[int] = []

    def start(self) -> None:
        """The round is about to have a gradient: if the round fails, it must be forgotten."""
        self.begun = True

    def mark(self, index: int) -> bool:
        """Mark gradient `index` as there. Returns whether this is its first mark in the round."""
        if self.marked[index]:
            return False
        self.marked[index] = True
        self.missing[self.bucket_of[index]] -= 1
        return True

    def mark_at_end(self, indices: Sequence[int]) -> None:
        """Mark gradients of a round in which all buckets leave at the end. indices: each at most once."""
        self.begun = True  # first: if the rest fails, the round must be forgotten
        if len(indices) == len(self.marked):
            self.marked = bytearray(b"\1") * len(indices)
        else:
            for index in indices:
                self.marked[index] = True

    def note_arrival(self, index: int) -> None:
        """Remember that gradient `index` came next."""
        self.arrived.append(index)

    def note_sent(self, request: Request[bool]) -> None:
        """The next bucket has left."""
        self.sent.append((request, request.handle))

    @property
    def next_is_full(self) -> bool:
        """Whether the next bucket can leave. The last bucket never leaves early."""
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
