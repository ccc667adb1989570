"""The replica check: compares weights between ranks, so that all ranks train the same model.

Averaged gradients keep equal models equal. If models differ at the start, or learning rates differ, each rank trains a
model of its own, and no operation fails. So the ranks compare checksums of weights, and of other values that must be
equal, bit by bit. When training begins, different weights or optimizer state are an error; after `join()` only weights
are. Different options, and any difference later, are a warning. The run may still be worth something to the user, and
GPUs of different kinds round differently. The user may turn errors into warnings, or the check off (`replica_check=`).

In the walk of a gradient, the check comes last. After each round PyTorch's attachment, or `watched` for Keras and
TensorFlow, calls `Alike.look`, which compares the ranks in few rounds only. The last comparison is a part of the
shutdown, which all ranks come to anyway (`Lane.farewell`), so no rank waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from operator import itemgetter
from typing import Protocol, TypeAlias, TypeVar, cast

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
WIDTH = 1024  # words in a row of the table in `checksum_of`
Values: TypeAlias = Mapping[tuple[str, str], object]
"""Numbers that must be the same on all ranks, by kind ("weights", "state", "settings") and name."""
Sides: TypeAlias = list[tuple[object, list[int]]]
"""The different values of one name, and the ranks that have each."""


class Table(Protocol):
    """An array or tensor of integers, as `checksum_of` uses it."""

    @property
    def view(self) -> Callable[..., Table]: ...
    @property
    def reshape(self) -> Callable[..., Table]: ...
    @property
    def sum(self) -> Callable[..., Table]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> Table: ...


TableT = TypeVar("TableT", bound=Table)


class Schedule:
    """The rounds after which the ranks are compared: begin, 2 * begin, 4 * begin, ..., then every ROUNDS rounds.

    Doubling finds early differences within the first steps, at little cost.

    Attributes:
        begin: The first of these rounds.
        rounds: The rounds since training began.
        next: The next of these rounds.
        first: Whether no comparison since training began has succeeded.
    """

    def __init__(self, begin: int) -> None:
        self.begin = begin
        self.start_over()

    def start_over(self) -> None:
        """Training begins with the next round."""
        self.rounds, self.next, self.first = 0, self.begin, True

    def count(self) -> None:
        """A round has ended."""
        self.rounds += 1

    @property
    def due(self) -> bool:
        """Whether the ranks are to be compared now."""
        return self.rounds >= self.next

    def compared(self) -> None:
        """A comparison has succeeded, or was a warning."""
        self.first, self.next = False, min(2 * self.rounds, self.rounds + ROUNDS)


class Alike:
    """The comparisons among the ranks that reduce gradients together: during training, and when the job ends.

    Attributes:
        values: Reads this rank's values.
        calls: The cure for a difference, by kind.
        what: The user's call, in messages.
        mode: One of `config.REPLICA_CHECKS`.
        warned: The kinds that a warning has named.
        ended: Whether the last comparison is under way.
        lane: The lane of the ranks.
        name: The name of rounds on that lane.
        root: The rank with the right weights, in words.
        fatal: The kinds for which a difference is an error when training begins.
        schedule: The rounds after which the ranks are compared.
    """

    lane: Lane
    name: str

    def __init__(
        self,
        values: Callable[[bool], Values | None],
        calls: Mapping[str, str],
        what: str,
        mode: str = "error",
        begin: int = 1,
    ) -> None:
        """
        Args:
            values: Reads this rank's values; returns None if they cannot be read. Its argument tells whether training
                begins: then the optimizer's state counts, too.
            calls: For each kind the call that makes ranks equal, with {root} for a rank.
            what: The user's call that the ranks are compared for.
            mode: One of `config.REPLICA_CHECKS`.
            begin: The round after which the ranks are first compared.
        """
        self.values, self.calls, self.what, self.mode = values, calls, what, mode
        self.warned: set[str] = set()
        self.ended = False
        self.schedule = Schedule(begin)
        self.expect("0", fatal=("weights", "state"))

    @property
    def rounds(self) -> int:
        """The rounds since training began."""
        return self.schedule.rounds

    def enter(self, lane: Lane, name: str) -> None:
        """Compare the ranks of this lane from now on.

        Args:
            lane: The lane.
            name: The name of rounds on that lane, the same on all ranks.
        """
        self.lane, self.name = lane, name
        runtime.current().registries.compare_at_end(self)

    def agree(self) -> None:
        """Agree whether the ranks compare. Collective. Raises MismatchError if the ranks' modes differ."""
        facts = ((MODE, self.mode),)
        self.lane.run(Request(Signature("plan", f"{self.name} bucket 0", facts), nothing))

    def expect(self, root: str = LAST, fatal: Collection[str] = ("weights",)) -> None:
        """Training begins with the next round.

        Args:
            root: The rank with the right weights, in words.
            fatal: The kinds for which a difference is an error. The user may mean other differences, so those are
                warnings.
        """
        self.root, self.fatal = root, fatal
        self.schedule.start_over()

    def name_root(self, root: str) -> None:
        """Name the rank with the right weights, in words."""
        self.root = root

    def look(self) -> None:
        """Count a round that has ended, and compare the ranks if it is time. Collective then.

        Raises:
            MismatchError: Weights differ when training begins. Every rank raises it, after each round until they agree.
        """
        if self.due():
            self.compare(self.mine())

    def due(self) -> bool:
        """Count a round that has ended. Returns whether `compare` is to follow, the same on all ranks."""
        self.schedule.count()
        return self.mode != OFF and self.schedule.due

    def compare(self, mine: Values | None) -> None:
        """Compare the ranks. Collective.

        Args:
            mine: This rank's values; None if they cannot be read.

        Raises:
            MismatchError: As for `look`.
        """
        found = compared(self.lane, self.name, mine)
        first = self.schedule.first
        if first and self.mode == "error" and any(kind in self.fatal for kind, _ in found):
            raise MismatchError(
                f"{self.what}: the ranks would train different models:\n{self.told(found)} {MEANT} [HVD301]"
            )
        self.warn(found, "the ranks train" if first else f"after {self.rounds} steps the ranks train")
        self.schedule.compared()

    def warn(self, found: Mapping[tuple[str, str], Sides], begin: str) -> None:
        """Log the differences on the first rank, once for each kind. begin: the first words of the message."""
        news = {kind for kind, _ in found} - self.warned
        self.warned |= news
        if news and self.lane.transport.rank == 0:
            text = "%s: %s different models:\n%s [HVD302]"
            logging.getLogger("hvdlite").warning(text, self.what, begin, self.told(found))

    def prepare_last_look(self) -> None:
        """Have the ranks compared once more when all of them leave: the job ends well on this rank. Never waits.

        There is no last comparison if no round has ended since training began, or if the last round has raised.
        """
        has_raised = self.schedule.first and self.schedule.due
        if self.mode != OFF and self.rounds and not has_raised and (mine := self.mine()) is not None:
            self.lane.farewell.bring(self.name, mine, self.look_back)

    def look_back(self, everyone: Sequence[Values]) -> None:
        """Compare all ranks' values at the end of the job, on each rank."""
        self.ended = True
        self.warn(apart(everyone, self.lane.members), f"when the job ended, after {self.rounds} steps, the ranks had")

    def mine(self) -> Values | None:
        """This rank's values; None if they cannot be read."""
        try:
            return self.values(self.schedule.first)
        except Exception:  # on this rank only, perhaps: no memory
            logging.getLogger("hvdlite").exception("the weights of this rank cannot be compared with others'")
            return None

    def told(self, found: Mapping[tuple[str, str], Sides]) -> str:
        """The differences in words, and the cure."""
        kinds: dict[str, dict[str, Sides]] = {}
        for (kind, name), parties in found.items():
            kinds.setdefault(kind, {})[name] = parties
        lines = [f"  {kind}: {valued(its) if kind == 'settings' else named(its)}" for kind, its in kinds.items()]
        calls = " and ".join(dict.fromkeys(self.calls[kind].format(root=self.root) for kind in kinds))
        if self.ended:
            cure = f"{CAUSES} Nothing is wrong if that was after training, as when rank 0 loads its best weights."
        elif self.schedule.first:
            cure = f"Call {calls} on all ranks before training."
        else:
            cure = f"{CAUSES} {calls} brings them together again."
        return "\n".join([*lines, cure])


def compared(lane: Lane, name: str, mine: Values | None) -> dict[tuple[str, str], Sides]:
    """Return `apart` of all ranks' values, the same on every rank. Collective; waits for all ranks.

    The result is empty if a rank could not read its values, and while ranks have joined, since those train no more.

    Args:
        lane: The lane of the ranks.
        name: The name of rounds on that lane.
        mine: This rank's values; None if they cannot be read.
    """

    def work(at: Workplace) -> dict[tuple[str, str], Sides]:
        if at.some_joined or at.equal_counts:
            return {}
        everyone = at.transport.allgather_object(None if mine is None else dict(mine))
        known = [values for values in everyone if values is not None]
        return apart(known, at.members) if len(known) == len(everyone) else {}

    # The name is that of a round's first bucket. If other ranks begin a round instead, all ranks raise, none hangs.
    signature = Signature("weights", f"{name} bucket 0")
    count = -1 if mine is None else digest(str(sorted(mine.items(), key=itemgetter(0))))  # as text: NaN != NaN
    return lane.run(Request(signature, work, count=count, stand_in=lambda: nothing))


def nothing(at: Workplace) -> None:
    """The contribution of a rank that has joined."""


def apart(everyone: Sequence[Values], members: Sequence[int]) -> dict[tuple[str, str], Sides]:
    """Find the values that differ between ranks.

    Args:
        everyone: The values of each rank. A value of None cannot be compared.
        members: The ranks, in the same order.

    Returns:
        By kind and name, the different values and the ranks that have each. A rank without a value has NONE.
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
    """A checksum of the bits of an array on the host."""
    return checksum_of(np.ascontiguousarray(array).reshape(-1).view(np.uint8), np.int64, lambda part: part)


def checksum_of(bits: TableT, words: object, fetch: Callable[[TableT], Array]) -> int:
    """A checksum of bytes in their order, at half the speed of memory.

    The bytes form a table of 64-bit integers. The digest is that of the sums of rows and of columns. These are few, and
    they change if two integers change places.

    Args:
        bits: The bytes, as a flat array or tensor of dtype uint8.
        words: The dtype of 64-bit integers, as the library of `bits` spells it.
        fetch: Copies an array or tensor to the host.
    """
    whole = len(bits) // (8 * WIDTH) * 8 * WIDTH
    table = bits[:whole].view(words).reshape(-1, WIDTH)
    parts = cast("list[TableT]", [table.sum(0), table.sum(1), bits[whole:]] if whole else [bits])
    return int.from_bytes(blake2b(b"".join(fetch(part).tobytes() for part in parts), digest_size=8).digest(), "little")
