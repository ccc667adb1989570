"""Signatures: what ranks must agree on before they communicate, and its digest.

A `Signature` has kind, name, dtype, shape, operation, factors, root and placement. The roll call compares digests;
ranks exchange signatures only if digests differ.
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
"""Pairs of a fact's name and its value, in a fixed order."""

UNKNOWN = "unknown"
"""The value of a fact that a rank does not know. It agrees with every other value."""

BITS = (1 << 62) - 1


def digest(text: str) -> int:
    """62 bits, equal in all processes for equal texts. (Python's hash() differs between processes.)"""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & BITS


@lru_cache(maxsize=1024)
def digest_of_facts(kind: str, facts: Facts) -> int:
    """The digest of what stays the same call after call. Writing it out takes longest, so it is cached."""
    return digest(f"{kind} {facts}")


@lru_cache(maxsize=1024)
def digest_of_name(name: str, words: str) -> int:
    return digest(f"{name}\n{words}")

ODD = [digest(f"number {i}") | 1 for i in range(4)]
"""Factors of a round's numbers, so that different numbers have different sums."""


class Round(NamedTuple):
    """Which backward a request belongs to: words with a {} for each of up to four numbers.

    Only the numbers change from round to round, so that digests of the words are cached (MEASURED.md, "Details").
    """

    words: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return self.words.format(*self.numbers)

    @property
    def number(self) -> int:
        """The numbers' part of a digest."""
        return sum(map(mul, self.numbers, ODD))


class Signature(NamedTuple):
    """What one rank says about a request.

    Attributes:
        kind: "allreduce", ...
        name: The tensor's or plan's name.
        facts: What ranks must agree on.
        round: Tells apart requests of one name.
        called: The user's call on this rank, for messages. Ranks need not agree on it.
    """

    kind: str
    name: str
    facts: Facts = ()
    round: Round | str = ""
    called: str = ""

    def digest(self) -> int:
        """Equal in all processes for equal signatures. Different signatures collide with a chance of 2^-62."""
        words, number = (self.round.words, self.round.number) if isinstance(self.round, Round) else (self.round, 0)
        return (digest_of_facts(self.kind, self.facts) + digest_of_name(self.name, words) + number) & BITS

    @property
    def key(self) -> str:
        """The text by which ranks match it."""
        return f"{self.kind} '{self.name}'"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return self.called or calls.title(self.kind, self.name)

UNEVEN = (
    "Where ranks have different numbers of batches, call hvd.join() after the loop, or drop the remainder "
    "(drop_last=True, dataset.take(n))."
)
"""The cure if one rank is in a backward and another has left the loop."""

END = "end"
"""The kind of the request that a rank makes instead of a step's first bucket when it has ended an epoch of fit()."""

LEAVE = Signature("shutdown", "all")

JOIN = Signature("join", "all")
"""Runs when all ranks have joined. Until then a rank with this at the head of its queue takes part in others' requests.
"""
