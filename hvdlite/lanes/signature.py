"""A signature is one rank's description of an operation: kind, name, facts, round, and the user's call.

Facts are pairs such as dtype, shape or root rank; the module that makes the request chooses them. All but the user's
call must be equal on all ranks. A fact that a rank does not know (UNKNOWN) agrees with every value. The roll call
compares digests. Ranks exchange signatures only if digests differ.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from operator import mul
from typing import NamedTuple, TypeAlias

from hvdlite.lanes import calls

Facts: TypeAlias = tuple[tuple[str, object], ...]
"""Pairs of a fact's name and its value, in a fixed order."""

UNKNOWN = "unknown"
"""The value of a fact that a rank does not know. It agrees with every other value."""

BITS = (1 << 62) - 1


def digest(text: str) -> int:
    """A number of 62 bits, equal in all processes for equal texts. (Python's hash() differs between processes.)"""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") & BITS


@lru_cache(maxsize=1024)
def digest_of_facts(kind: str, facts: Facts) -> int:
    """The digest of kind and facts. It is cached, because they often stay the same, and their text takes longest."""
    return digest(f"{kind} {facts}")


@lru_cache(maxsize=1024)
def digest_of_name(name: str, words: str) -> int:
    """The digest of a name and a round's words, cached."""
    return digest(f"{name}\n{words}")


ODD = [digest(f"number {i}") | 1 for i in range(4)]
"""Factors of a round's numbers. So different numbers give different sums, except by chance."""


class Round(NamedTuple):
    """The backward that a request belongs to, such as "step 5": words with a {} for each of up to four numbers.

    Only the numbers change from round to round, so digests of the words can be cached (MEASURED.md, "Details").
    """

    words: str
    numbers: tuple[int, ...]

    def __str__(self) -> str:
        return self.words.format(*self.numbers)

    @property
    def number(self) -> int:
        """The part of a digest that depends on the numbers."""
        return sum(map(mul, self.numbers, ODD))


class Signature(NamedTuple):
    """One rank's description of a request.

    Attributes:
        kind: The kind of operation: "allreduce", ...
        name: The tensor's or plan's name.
        facts: Properties that must be equal on all ranks.
        round: Distinguishes requests of one name.
        called: The user's call on this rank, for messages. It may differ between ranks.
    """

    kind: str
    name: str
    facts: Facts = ()
    round: Round | str = ""
    called: str = ""

    def digest(self) -> int:
        """A number of 62 bits. Different signatures have the same digest with a chance of 2^-62."""
        words, number = (self.round.words, self.round.number) if isinstance(self.round, Round) else (self.round, 0)
        return (digest_of_facts(self.kind, self.facts) + digest_of_name(self.name, words) + number) & BITS

    @property
    def key(self) -> str:
        """The text by which ranks match the request."""
        return f"{self.kind} '{self.name}'"

    @property
    def title(self) -> str:
        """The request's name in messages."""
        return self.called or calls.title(self.kind, self.name)


UNEVEN = (
    "If ranks have different numbers of batches, put the loop within hvd.uneven_inputs(model, optimizer), call "
    "hvd.join() after the loop, or take the same number of batches on all ranks (hvd.shard, dataset.take(n))."
)
"""The cure if one rank is in a backward and another has left the loop."""

END = "end"
"""The kind of the request that a rank calls when it has ended an epoch of fit(), instead of a step's first bucket."""
LEAVE = Signature("shutdown", "all")
"""The request to leave a lane. It runs when all ranks have called it."""
JOIN = Signature("join", "all")
"""The request of `hvd.join()`. Until all ranks have called it, a rank with it at the head of its queue takes part in
other ranks' requests.
"""
