"""The bucket plan: which gradient lies where. Computed once, equal on all ranks, replayed at every backward.

    parameters, last first:   w5 b5 | w4 b4 w3 | b3 w2 b2 w1 b1      buckets in the order in which they fill

Gradients are produced roughly from the last parameter to the first, so buckets follow that order, or the real one once
it is known; the first bucket is small so that communication can start early. One bucket has one dtype and one device.
The plan's `lines` are what ranks compare: a rank with another model is found before any gradient moves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np

from hvdlite.arrays import LINE


@dataclass(frozen=True)
class Spec:
    """One parameter as the plan sees it. dtype: that of its gradient on the wire. device: 'host' or a device."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "host"
    group: int | None = None
    """Parameters of one group travel in one bucket; None: wherever they fit."""
    strides: tuple[int, ...] = ()
    """How its elements lie in memory; () where they do in the usual order."""

    @property
    def length(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def line(self) -> str:
        """The parameter as text, for comparing models."""
        order = f", strides {list(self.strides)}" if self.strides else ""
        return f"{self.name}: {self.dtype}{list(self.shape)}{order} on {self.device}"


@dataclass(frozen=True)
class Slot:
    """A parameter's place: `length` elements from `offset` of its bucket's flat array."""

    bucket: int
    offset: int
    length: int


@dataclass(frozen=True)
class Bucket:
    """`length` elements (padding included) that lie `start` bytes into their device's arena."""

    dtype: np.dtype[Any]
    device: str
    start: int
    length: int
    members: tuple[int, ...]
    """Indices of the parameters in it."""


@dataclass(frozen=True)
class BucketPlan:
    """specs and slots are in the caller's order of parameters; buckets in the order in which they are sent."""

    specs: tuple[Spec, ...]
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The plan as text, one line per parameter: equal on all ranks, or the ranks' models differ."""
        return tuple(spec.line for spec in self.specs)

    def nbytes(self, device: str) -> int:
        """The size of the device's arena."""
        return max((b.start + b.length * b.dtype.itemsize for b in self.buckets if b.device == device), default=0)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({bucket.device for bucket in self.buckets}))


def plan(
    specs: Iterable[Spec], bucket_bytes: int, first_bytes: int, last_bytes: int = 0, order: Sequence[int] | None = None
) -> BucketPlan:
    """Fill each kind's buckets, as `fill` does, with the last parameter first, or in the order of these indices; they
    are sent in the order in which they begin to fill. Pure: equal input gives equal plans."""
    specs = tuple(specs)
    order = range(len(specs))[::-1] if order is None else order
    turns = {index: turn for turn, index in enumerate(order)}
    kinds: dict[tuple[str, str], list[list[int]]] = {}
    for unit in units(specs, order):
        kinds.setdefault((specs[unit[0]].dtype, specs[unit[0]].device), []).append(unit)
    nbytes = [padded(spec) for spec in specs]
    filled = [bucket for kind in kinds.values() for bucket in fill(kind, nbytes, bucket_bytes, first_bytes, last_bytes)]
    return lay_out(specs, sorted(filled, key=lambda bucket: turns[bucket[0]]))


def fill(
    units: Sequence[Sequence[int]], nbytes: Sequence[int], bucket_bytes: int, first_bytes: int, last_bytes: int
) -> list[list[int]]:
    """Buckets of at least bucket_bytes, the first of first_bytes; behind them, where last_bytes is not 0, a short one.
    nbytes: of each parameter.

    What is in a bucket leaves with the unit that fills it, however large that is: a few small ones ahead of a large one
    are not worth a request of their own. Nor are less than 2 * last_bytes that remain ahead of the last bucket.
    """
    sizes = [sum(nbytes[index] for index in unit) for unit in units]
    end = start_of_last(sizes, first_bytes, last_bytes)
    room, rest = 0, sum(sizes[:end])
    buckets: list[list[int]] = []
    for unit, size in zip(units[:end], sizes, strict=False):
        if not buckets or (room <= 0 and rest >= min(2 * last_bytes, bucket_bytes)):
            room = bucket_bytes if buckets else first_bytes
            buckets.append([])
        buckets[-1].extend(unit)
        room -= size
        rest -= size
    if end < len(units):
        buckets.append([index for unit in units[end:] for index in unit])
    return buckets


def start_of_last(sizes: Sequence[int], first_bytes: int, last_bytes: int) -> int:
    """The unit with which the last bucket begins, which is as short as last_bytes allows, for no backward hides a thing
    of it; len(sizes) where there is none, since last_bytes is 0, or what is ahead of it would not fill a first one.

    A quarter more belongs to it where that fits: a bias, which comes with its weight, and would keep others waiting.
    """
    behind = list(accumulate(reversed(sizes)))  # bytes of the last unit, of the last two, ...
    needed = bisect_left(behind, last_bytes)
    if not last_bytes or needed == len(behind):
        return len(sizes)
    count = bisect_right(behind, behind[needed] + last_bytes // 4)
    return len(sizes) - count if behind[-1] - behind[count - 1] >= first_bytes else len(sizes)


def units(specs: Sequence[Spec], indices: Sequence[int]) -> list[list[int]]:
    """What must stay together, in this order: single parameters, and groups at their first member's place in it."""
    found: dict[Any, list[int]] = {}
    for index in indices:
        spec = specs[index]
        key = index if spec.group is None else (spec.group, spec.dtype, spec.device)
        found.setdefault(key, []).append(index)
    return list(found.values())


def padded(spec: Spec) -> int:
    """Bytes of a parameter's slot: in whole lines, so that no two ranks ever write neighbours in one at once."""
    return -(-spec.length * np.dtype(spec.dtype).itemsize // LINE) * LINE


def lay_out(specs: Sequence[Spec], filled: Sequence[Sequence[int]]) -> BucketPlan:
    """Give each bucket its place in its device's arena, and each parameter its place in its bucket."""
    slots: dict[int, Slot] = {}
    buckets: list[Bucket] = []
    ends: dict[str, int] = {}
    for number, members in enumerate(filled):
        dtype, device = np.dtype(specs[members[0]].dtype), specs[members[0]].device
        offset = 0
        for index in members:
            slots[index] = Slot(number, offset // dtype.itemsize, specs[index].length)
            offset += padded(specs[index])
        start = ends.get(device, 0)
        buckets.append(Bucket(dtype, device, start, offset // dtype.itemsize, tuple(members)))
        ends[device] = start + offset
    return BucketPlan(tuple(specs), tuple(slots[index] for index in range(len(specs))), tuple(buckets))
