"""Whether all ranks train the same model.

Averaging gradients keeps models together that begin together. If they do not, or if learning rates differ, each rank
trains a model of its own with gradients of all the others', and no operation fails. So weights, and what else must be
the same, are compared bit by bit when training begins, where a difference is an error, and later and when the job ends,
where it is a warning: hours of training may be worth something to a user, and GPUs of different kinds round
differently. No rank waits for a last look: it is a part of the shutdown that all ranks come to anyway (`Lane.part`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from hvdlite.arrays import Array
from hvdlite.errors import MismatchError
from hvdlite.job import runtime
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.matching import ranks, sides
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature, digest
from hvdlite.lanes.workplace import Workplace

ROUNDS = 500  # the most between comparisons, which take a part of one step
OFF = "off"
MODE = "replica_check"
CAUSES = (
    "Something has changed them on some ranks only: weights or a scheduler loaded on one rank, a scheduler that "
    "follows a rank's own loss (average that first: hvd.allreduce(loss))."
)
MEANT = 'If they are meant to differ: replica_check="warn", or HVDLITE_REPLICA_CHECK=warn.'
LAST = "(the rank that hvd.join() returned)"
NONE = "none"
MOST = 3  # sides that a message names
WIDTH = 1024  # words in a row of the table whose sums are compared
Values = Mapping[tuple[str, str], Any]
"""By kind ("weights", ...) and name: a number that is the same on all ranks."""
Sides = list[tuple[Any, list[int]]]


class Alike:
    """Comparisons among the ranks that reduce gradients together: at steps 1, 2, 4, ..., 256, then every ROUNDS steps,
    and when the job ends. Doubling finds what comes apart early within the first steps, at little cost."""

    def __init__(
        self, values: Callable[[bool], Values | None], calls: Mapping[str, str], what: str, mode: str = "error",
        begin: int = 1,
    ) -> None:
        """
        Args:
            values: Reads this rank's values; None where they cannot be read. Its argument: whether training begins,
                when the optimizer's state counts, too.
            calls: For each kind what makes the ranks alike, with {root} for a rank.
            what: The name of the user's call that the ranks are compared for.
            mode: One of `config.REPLICA_CHECKS`.
            begin: The round after which the ranks are first compared; later ones follow at 2 * begin, 4 * begin, ...
        """
        self.values, self.calls, self.what = values, calls, what
        self.mode, self.begin = mode, begin
        self.warned: set[str] = set()  # of which kinds
        self.ended = False  # the last look is under way
        self.expect("0", fatal=("weights", "state"))

    def enter(self, lane: Lane, name: str) -> None:
        """Compare the ranks of this lane from now on. name: of the rounds there, the same on all ranks."""
        self.lane, self.name = lane, name
        runtime.current().last_looks.append(self)

    def agree(self) -> None:
        """See to it that all ranks compare, or none. Collective. Raises MismatchError where their modes differ."""
        facts = ((MODE, self.mode),)
        self.lane.run(Request(Signature("plan", f"{self.name} bucket 0", facts), nothing))

    def expect(self, root: str = LAST, fatal: Collection[str] = ("weights",)) -> None:
        """Training begins with the next round. root: the rank whose weights are the right ones, in words. fatal: the
        kinds of which a difference is an error then; others are warned of, for they may be meant so."""
        self.root, self.fatal = root, fatal
        self.first, self.rounds = True, 0
        self.next = self.begin  # the round after which the ranks are compared

    def name_root(self, root: str) -> None:
        """The rank whose weights are the right ones, in words."""
        self.root = root

    def look(self) -> None:
        """At the end of a round: compare, if it is time. Collective then. Raises MismatchError on every rank when
        training begins, after each round until all is alike."""
        if self.due():
            self.compare(self.mine())

    def due(self) -> bool:
        """At the end of a round: count it. Whether `compare` is to follow, the same on all ranks."""
        self.rounds += 1
        return self.mode != OFF and self.rounds >= self.next

    def compare(self, mine: Values | None) -> None:
        """Compare the ranks. mine: this rank's values. Collective. Raises MismatchError as `look` does."""
        found = compared(self.lane, self.name, mine)
        if self.first and self.mode == "error" and any(kind in self.fatal for kind, _ in found):
            raise MismatchError(f"{self.what}: the ranks would train different models:\n{self.told(found)} {MEANT}")
        self.warn(found, "the ranks train" if self.first else f"after {self.rounds} steps the ranks train")
        self.first = False
        self.next = min(2 * self.rounds, self.rounds + ROUNDS)

    def warn(self, found: Mapping[tuple[str, str], Sides], begin: str) -> None:
        """Say once of each kind, on the first rank, what differs. begin: the first words of the message."""
        news = {kind for kind, _ in found} - self.warned
        self.warned |= news
        if news and self.lane.transport.rank == 0:
            text = "%s: %s different models:\n%s"
            logging.getLogger("hvdlite").warning(text, self.what, begin, self.told(found))

    def prepare_last_look(self) -> None:
        """The job ends well on this rank: have the ranks compared once more, when all of them leave. Waits for nobody.

        Nothing is compared where no round has been since training began, nor what the last round has told as an error.
        """
        has_told = self.first and self.rounds >= self.next
        if self.mode != OFF and self.rounds and not has_told and (mine := self.mine()) is not None:
            self.lane.farewell.bring(self.name, mine, self.look_back)

    def look_back(self, everyone: Sequence[Values]) -> None:
        """All ranks leave. everyone: their values."""
        self.ended = True
        self.warn(apart(everyone, self.lane.members), f"when the job ended, after {self.rounds} steps, the ranks had")

    def mine(self) -> Values | None:
        try:
            return self.values(self.first)
        except Exception:  # no memory, say, on this rank only
            logging.getLogger("hvdlite").exception("the weights of this rank cannot be compared with others'")
            return None

    def told(self, found: Mapping[tuple[str, str], Sides]) -> str:
        """What differs, and the cure."""
        kinds: dict[str, dict[str, Sides]] = {}
        for (kind, name), parties in found.items():
            kinds.setdefault(kind, {})[name] = parties
        lines = [f"  {kind}: {valued(its) if kind == 'settings' else named(its)}" for kind, its in kinds.items()]
        calls = " and ".join(dict.fromkeys(self.calls[kind].format(root=self.root) for kind in kinds))
        if self.ended:
            cure = f"{CAUSES} Nothing is wrong if that was after training, as when rank 0 loads its best weights."
        elif self.first:
            cure = f"Call {calls} on all ranks before training."
        else:
            cure = f"{CAUSES} {calls} brings them together again."
        return "\n".join([*lines, cure])


def compared(lane: Lane, name: str, mine: Values | None) -> dict[tuple[str, str], Sides]:
    """`apart` over the lane's ranks, the same result on all. name: of what is compared. Collective; waits for all.

    Nothing is compared where a rank could not read its values, nor while ranks have joined: they train no more.
    """

    def work(at: Workplace) -> dict[tuple[str, str], Sides]:
        if at.some_joined or at.equal_counts:
            return {}
        everyone = at.transport.allgather_object(None if mine is None else dict(mine))
        known = [values for values in everyone if values is not None]
        return apart(known, at.members) if len(known) == len(everyone) else {}

    # Named like a round's first bucket: where other ranks begin a round instead, that is a mismatch, not a wait.
    signature = Signature("weights", f"{name} bucket 0")
    count = -1 if mine is None else digest(str(sorted(mine.items())))  # of NaNs, too, which do not equal themselves
    found: dict[tuple[str, str], Sides] = lane.run(Request(signature, work, count=count, stand_in=lambda: nothing))
    return found


def nothing(at: Workplace) -> None:
    """What a rank that has joined contributes."""


def apart(everyone: Sequence[Values], members: Sequence[int]) -> dict[tuple[str, str], Sides]:
    """What is not the same everywhere: the values (NONE where a rank has none), and the ranks that have each.

    everyone: each rank's values; None where one cannot be told. members: the ranks, in the same order.
    """
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    values = {name: [theirs.get(name, NONE) for theirs in everyone] for name in names}
    found = {name: sides(each, members) for name, each in values.items() if None not in each}
    return {name: parties for name, parties in found.items() if len(parties) > 1}


def named(found: Mapping[str, Sides]) -> str:
    """'fc.weight and 3 more differ between rank 1 and ranks 0, 2'."""
    (first, parties), others = next(iter(found.items())), len(found) - 1
    what = f"{first} and {others} more differ" if others else f"{first} differs"
    return f"{what} between {' and '.join(ranks(who) for _, who in parties[:MOST])}"


def valued(found: Mapping[str, Sides]) -> str:
    """'lr is 0.1 on rank 1, 0.01 on ranks 0, 2'."""
    each = {name: [f"{value} on {ranks(who)}" for value, who in parties[:MOST]] for name, parties in found.items()}
    return "; ".join(f"{name} is {', '.join(values)}" for name, values in each.items())


def checksum(array: Array) -> int:
    """Of the bits of an array on the host."""
    return checksum_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8), np.int64, lambda part: part)


def checksum_of(bits: Any, words: Any, fetch: Callable[[Any], Array]) -> int:
    """A number for these bytes, an array or a torch tensor of uint8, in their order; at half the speed of memory.

    The sums of the rows and of the columns of a table of them in 64-bit integers (the dtype `words`) are digested: few,
    and others where two integers change places. fetch: makes an array on the host of such sums.
    """
    whole = len(bits) // (8 * WIDTH) * 8 * WIDTH
    table = bits[:whole].view(words).reshape(-1, WIDTH)
    parts = [table.sum(0), table.sum(1), bits[whole:]] if whole else [bits]
    return int.from_bytes(blake2b(b"".join(fetch(part).tobytes() for part in parts), digest_size=8).digest(), "little")
