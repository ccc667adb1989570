"""The operations of a `Chain`, in which all ranks take part in one order.

All ranks call each operation, also a message between two of them. So they always wait in the same operation, and a rank
that has raised an error can tell the others: it calls the operation, too, with a flag. Then the operation raises on
every rank. If ranks are about to do different things, `agree` raises on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TypeVar

import numpy as np

from hvdlite.algorithms import movement
from hvdlite.arrays import Array
from hvdlite.errors import HvdliteError, VoidError
from hvdlite.job import runtime
from hvdlite.keras.chain.parts import Ranks
from hvdlite.lanes.calls import calling
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace

T = TypeVar("T")
LONGEST_TEXT = 1500  # bytes of an error's text that other ranks get


class Act(Enum):
    """What a rank is about to do, in words, with numbers that must be equal in its column."""

    TRAIN = "trains on a batch of {} rows (arrays of labels: {})"
    TEST = "evaluates a batch of {} rows (arrays of labels: {})"
    PREDICT = "predicts a batch of {} rows"
    FIT = "begins fit() for {} epochs"
    EPOCH = "begins epoch {}"
    TRAINED = "ends fit()"
    TESTED = "ends evaluate()"
    PREDICTED = "ends predict()"


ACTS = list(Act)


class Lockstep:
    """The joint operations of one chain, on one rank. Each waits for all ranks.

    Attributes:
        columns: The ranks of each column, by part.
        column: Those of this rank's column.
        rank: This rank.
        shared: Whether the other ranks know of the error under way, if there is one.
        failure: The last request of `fail`; None once it is done.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.columns, self.rank = list(zip(*ranks, strict=True)), runtime.rank()
        self.column = next(column for column in self.columns if self.rank in column)
        self.shared = False
        self.failure: Handle[None] | None = None

    @contextlib.contextmanager
    def together(self, end: Act) -> Iterator[None]:
        """Within this context, an error on one rank becomes an error on all. All ranks leave it together."""
        self.shared = False
        try:
            yield
            self.agree(end)
        except BaseException as error:
            if not self.shared:
                text = str(error)[-LONGEST_TEXT // 2 :]  # TensorFlow's errors have their sense at the end
                self.fail(f"rank {self.rank} has raised {type(error).__name__}: {text}")
            raise

    def fail(self, text: str) -> None:
        """Have the other ranks' next operation raise an error with this text. Does not wait."""
        with contextlib.suppress(HvdliteError):  # communication is broken, and the other ranks notice that, too
            self.failure = runtime.group_of(None).eager.submit(request(lambda at: None, text=text))
        self.shared = True

    def run(self, what: str, work: Callable[[Workplace], T], count: int = 0) -> T:
        """Run an operation. what: its name in messages. count: a number that `work` can compare between ranks."""
        if self.failure is not None:
            with contextlib.suppress(HvdliteError):
                self.failure.wait()
            self.failure = None
        self.shared = True  # if the operation raises, other ranks know
        with calling(f"hvd.Chain ({what})"):
            result = runtime.group_of(None).eager.run(request(work, count))
        self.shared = False
        return result

    def gather(self, what: str, row: Array) -> Array:
        """Return all ranks' rows, by rank. Raises HvdliteError on every rank if their lengths differ."""

        def work(at: Workplace) -> Array:
            if not at.equal_counts:
                raise HvdliteError(f"hvd.Chain: the ranks have different {what}. Give compile() the same on every rank")
            return gathered(at, row)

        return self.run(what, work, row.size)

    def agree(self, act: Act, *numbers: int) -> None:
        """Compare what the ranks are about to do. Raises HvdliteError on every rank if it differs.

        numbers: At most two, which must be equal within a column.
        """
        mine = np.array([ACTS.index(act), *numbers, 0, 0][:3], np.int64)
        found = [tuple(row) for row in self.gather("next actions", mine).tolist()]
        same = all(len({found[rank] for rank in column}) == 1 for column in self.columns)
        if not same or len({row[0] for row in found}) > 1:
            told = (f"rank {rank} {ACTS[row[0]].value.format(*row[1:])}" for rank, row in enumerate(found))
            self.shared = True
            raise HvdliteError(
                f"hvd.Chain: the ranks' parts cannot work together: {', '.join(told)}. Give fit(), evaluate() and "
                "predict() equally many rows on every rank of a column, the same batch_size= and the same epochs=; and "
                "stop all ranks after the same epoch"
            )


def request(work: Callable[[Workplace], T], count: int = 0, text: str = "") -> Request[T]:
    """Return the request of an operation. text: this rank's error, if it has raised one: then no rank does the work."""

    def unless_failed(at: Workplace) -> T:
        if not made.flag:
            return work(at)
        mine = np.frombuffer(text.encode()[:LONGEST_TEXT].ljust(LONGEST_TEXT, b"\0"), np.uint8)
        texts = [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in gathered(at, mine).tolist()]
        raise VoidError(f"hvd.Chain: {'; '.join(filter(None, texts))}. So this rank stops, too")

    made = Request(Signature("chain", "hvd.Chain"), unless_failed, flag=int(text != ""), count=count)
    return made


def gathered(at: Workplace, row: Array) -> Array:
    """Return all ranks' rows of equal length. Runs on the lane."""
    found = np.empty((at.transport.size, row.size), row.dtype)
    found[at.transport.rank] = row
    movement.allgather(at.transport, list(found))
    return found
