"""`compression="auto"`: measures whether bfloat16 between hosts is faster than float32, and then uses the faster one.

On a slow network half of the bytes take half of the time. On a fast one, the casts take longer than they save. So the
first rounds of a reducer alternate between both ways. Then all ranks agree on the way that took less time between
hosts. Within a host nothing changes. Lossy compressors with error feedback are never chosen: they change what is
learned.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import median

import numpy as np

from hvdlite.algorithms import by_messages
from hvdlite.algorithms.choice import across
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, bfloat16
from hvdlite.compression.auto import Auto
from hvdlite.compression.column import Column
from hvdlite.compression.part import Section
from hvdlite.compression.store import Store
from hvdlite.gradients.lossy import LossyRounds
from hvdlite.gradients.plan import BucketPlan
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import Arena

WARM_UP = 4  # rounds that do not count
EACH = 6  # rounds each way
GAIN = 0.95  # bfloat16 is chosen if it takes less than this part of float32's time


def rounds_of(store: Store, plan: BucketPlan, within_host: bool) -> LossyRounds:
    """The rounds of a plan with a compressor between hosts. The arguments are those of `LossyRounds`."""
    kind = WireTrial if isinstance(store.compressor, Auto) else LossyRounds
    return kind(store, plan, within_host)


class WireTrial(LossyRounds):
    """The buckets of a plan between hosts, in float32 or bfloat16.

    Attributes:
        rounds: The rounds that have ended.
        seconds: The seconds between hosts of each round that counts, by way; True: in bfloat16.
        narrow: Whether the round under way travels in bfloat16.
    """

    def __init__(self, store: Store, plan: BucketPlan, within_host: bool) -> None:
        super().__init__(store, plan, within_host)
        self.rounds = 0
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.narrow = False

    def allocate(self, at: Workplace, arenas: Iterable[Arena]) -> None:
        """Find the drivers. Nothing is kept from round to round."""
        self.place(at, arenas)
        self.store.load(None)

    def part(self, column: Column, section: Section) -> Wire:
        """The all-reduce of a driver's part, for many rounds."""
        return Wire(self, column, section.values, section.how)

    def settle(self, results: Sequence[Array], unused: Collection[str], agree: Callable[[np.ndarray], None]) -> None:
        """A round has ended on all ranks: the trial goes on, or is decided. Collective when it is decided."""
        if not self.buckets or self.rounds >= WARM_UP + 2 * EACH:
            return
        self.rounds += 1
        if self.rounds > WARM_UP:
            parts = (bucket.part for bucket in self.buckets.values())
            self.seconds[self.narrow].append(sum(part.seconds for part in parts if isinstance(part, Wire)))
        self.narrow = self.rounds // 2 % 2 == 1  # two rounds each: the overlap trial alternates every round
        if self.rounds == WARM_UP + 2 * EACH:
            totals = np.array([median(self.seconds[narrow]) for narrow in (False, True)])
            agree(totals)
            whole, half = totals.tolist()
            self.narrow = half < GAIN * whole
            if self.levels.local.rank == 0 and self.levels.cross is not None and self.levels.cross.rank == 0:
                logging.getLogger("hvdlite").info(
                    'compression="auto": %.1f ms per step between hosts in float32, %.1f in bfloat16: %s from now on',
                    1e3 * whole, 1e3 * half, "bfloat16" if self.narrow else "float32",
                )  # fmt: skip


class Wire:
    """A driver's part of one bucket: an all-reduce between hosts in either dtype.

    Attributes:
        trial: The trial.
        column: One driver of each host.
        values: The part, in shared memory.
        small: The same in bfloat16.
        whole: The all-reduce in float32.
        half: The all-reduce in bfloat16. Sums are computed in float32.
        seconds: The time of the last round.
        sent_bytes: The bytes that this rank has sent in the last round.
        unsent: None, since everything is sent.
    """

    unsent = None

    def __init__(self, trial: WireTrial, column: Column, values: Array, how: Reduction) -> None:
        self.trial, self.column, self.values = trial, column, values
        self.small: Array = np.empty(values.size, bfloat16)
        self.whole = self.prepared(values, how)
        self.half = self.prepared(self.small, how)
        self.seconds = 0.0
        self.sent_bytes = 0

    def prepared(self, values: Array, how: Reduction) -> Callable[[], None]:
        """An all-reduce between hosts, for many rounds."""
        name = across(self.column.size, values.nbytes, values.dtype)
        return by_messages(name, self.column.transport, self.column.workspace, values, how)

    def __call__(self) -> None:
        """Replace the part by its sum over hosts. Collective over the column."""
        began, sent_before = time.perf_counter(), self.column.sent_bytes
        if self.trial.narrow and self.values.dtype == np.float32:
            self.small[...] = self.values
            self.half()
            self.values[...] = self.small
        else:
            self.whole()
        self.seconds, self.sent_bytes = time.perf_counter() - began, self.column.sent_bytes - sent_before
