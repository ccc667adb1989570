"""What all ranks must have alike before they communicate: the signature of a request, and its digest.

A `Signature` holds kind, name, dtype, shape, operation, factors, root and placement. The roll call compares digests;
signatures themselves are exchanged only when digests differ.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from operator import mul
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from hvdlite.lanes import calls

if TYPE_CHECKING:
    pass

Facts: TypeAlias = tuple[tuple[str, Any], ...]
"""Pairs of what and its value, in a fixed order."""

UNKNOWN = "unknown"
"""The value of a fact that a rank cannot tell: it agrees with the others', whatever they know."""

BITS = (1 << 62) - 1


def digest(text: str) -> int:
    """62 bits that are equal in all processes for equal texts. (Python's hash() differs per process.)"""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & BITS


@lru_cache(maxsize=1024)
def digest_of_facts(kind: str, facts: Facts) -> int:
    """Of what is the same call after call, while names and rounds change: writing it out takes longest."""
    return digest(f"{kind} {facts}")


@lru_cache(maxsize=1024)
def digest_of_name(name: str, words: str) -> int:
    return digest(f"{name}\n{words}")

ODD = [digest(f"number {i}") | 1 for i in range(4)]
"""What a round's numbers are multiplied by, so that no two of them add up to the same."""


class Round(NamedTuple):
    """Which backward a request is of: words with a {} for each of up to four numbers. Only these change: to write them
    out and digest them took 19 us behind a training step, whose caches are cold."""

    words: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return self.words.format(*self.numbers)

    @property
    def number(self) -> int:
        """What they add to a digest."""
        return sum(map(mul, self.numbers, ODD))


class Signature(NamedTuple):
    """kind: 'allreduce', ...; name: the tensor's or plan's; round: what tells it from others of that name. called: what
    the user called on the rank that made it, for messages; ranks need not agree on it."""

    kind: str
    name: str
    facts: Facts = ()
    round: Round | str = ""
    called: str = ""

    def digest(self) -> int:
        """Equal in all processes for equal signatures, and else different but for a chance of 2^-62."""
        words, number = (self.round.words, self.round.number) if isinstance(self.round, Round) else (self.round, 0)
        return (digest_of_facts(self.kind, self.facts) + digest_of_name(self.name, words) + number) & BITS

    @property
    def key(self) -> str:
        """What ranks match it by."""
        return f"{self.kind} '{self.name}'"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.called or calls.title(self.kind, self.name)

UNEVEN = (
    "Where ranks have different numbers of batches, call hvd.join() after the loop, or drop the remainder "
    "(drop_last=True, dataset.take(n))."
)
"""The cure where one rank is in a backward and another has left the loop."""

END = "end"
"""The kind of what a rank calls in place of a step's first bucket when it has ended an epoch of fit()."""

LEAVE = Signature("shutdown", "all")

JOIN = Signature("join", "all")
"""Runs when all ranks have joined; until then a rank whose queue it heads takes part in the others' requests."""
