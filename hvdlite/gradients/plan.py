"""The bucket plan: the place of every gradient in the arena's buckets.

    parameters, last first:   w5 b5 | w4 b4 w3 | b3 w2 b2 w1 b1      buckets, in the order in which they fill

In the walk of a gradient, the plan comes before the first round. An optimizer or an exchange describes its parameters
as `Spec`s, `policy.planned` chooses bucket sizes and calls `plan`, and the reducer replays the plan in every round.
`plan` is a pure function, so equal models give equal plans on all ranks.

Backward produces gradients roughly from the last parameter to the first. Buckets follow that order, or the real order
once the reducer knows it. The first bucket is small, so that communication can start early. All gradients of a bucket
have one dtype and lie on one device. Ranks compare the plan's `lines`: a rank with another model is found before any
gradient moves.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from hvdlite.arrays import LINE, DType

Borders: TypeAlias = tuple[tuple[int, ...], ...]
"""For each parameter size+1 elements: the piece of rank r is from border r to border r+1."""


@dataclass(frozen=True)
class Spec:
    """One parameter, as the plan sees it.

    Attributes:
        name: The parameter's name in messages.
        shape: The gradient's shape.
        dtype: The gradient's dtype on the wire, by name.
        device: 'host', or the kind of device that the gradient lies on: 'cuda'.
        group: The number of the parameter's group, which travels in one bucket; None: wherever it fits.
        strides: The order of the elements in memory; () for C order.
        lossy: The name under which a lossy compressor keeps what it has not sent; "" if the gradient travels exactly.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    device: str = "host"
    group: int | None = None
    strides: tuple[int, ...] = ()
    lossy: str = ""

    @property
    def length(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def line(self) -> str:
        """The parameter as text. Ranks compare these texts."""
        order = f", strides {list(self.strides)}" if self.strides else ""
        return (
            f"{self.name}: {self.dtype}{list(self.shape)}{order} on {self.device}{', compressed' if self.lossy else ''}"
        )


@dataclass(frozen=True)
class Slot:
    """A parameter's place: `length` elements from `offset` of its bucket's flat array."""

    bucket: int
    offset: int
    length: int


@dataclass(frozen=True)
class Bucket:
    """A bucket's place in an arena, and its parameters.

    Attributes:
        dtype: The dtype of all its gradients.
        device: The device that they lie on.
        start: The bucket's first byte in the device's arena.
        length: Elements, padding included.
        members: The bucket's parameters, by index, in the order of their slots.
        lossy: Whether hosts send each other a lossy code of the bucket.
    """

    dtype: DType
    device: str
    start: int
    length: int
    members: tuple[int, ...]
    lossy: bool = False


@dataclass(frozen=True)
class BucketPlan:
    """The layout of all gradients of one optimizer or exchange.

    Attributes:
        specs: The parameters, in the caller's order.
        slots: The place of each parameter, in the same order.
        buckets: The buckets, in the order in which they are sent.
        borders: The pieces whose results each rank needs; empty if all ranks need whole results.
    """

    specs: tuple[Spec, ...]
    slots: tuple[Slot, ...]
    buckets: tuple[Bucket, ...]
    borders: Borders = ()

    @cached_property
    def lines(self) -> tuple[str, ...]:
        """The parameters as text. If the ranks' models are the same, so are these lines."""
        return tuple(spec.line for spec in self.specs)

    def parts(self, bucket: Bucket, size: int) -> list[list[slice]]:
        """For each of `size` ranks the elements of a bucket whose result it needs."""
        places = [(self.slots[index].offset, self.borders[index]) for index in bucket.members]
        return [
            [slice(start + borders[rank], start + borders[rank + 1]) for start, borders in places
             if borders[rank] < borders[rank + 1]]
            for rank in range(size)
        ]  # fmt: skip

    def nbytes(self, device: str) -> int:
        """The size of the device's arena, in bytes."""
        return max((b.start + b.length * b.dtype.itemsize for b in self.buckets if b.device == device), default=0)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(sorted({bucket.device for bucket in self.buckets}))


def plan(
    specs: Iterable[Spec], bucket_bytes: int, first_bytes: int, last_bytes: int = 0, order: Sequence[int] | None = None
) -> BucketPlan:
    """Lay out gradients in buckets. Pure: equal arguments give equal plans.

    Each pair of dtype and device has buckets of its own, and so have gradients that are compressed. Buckets are sent in
    the order in which they begin to fill.

    Args:
        specs: The parameters.
        bucket_bytes: The least size of a bucket, as in `fill`.
        first_bytes: The least size of the first bucket.
        last_bytes: The size of the last bucket; 0: no special last bucket.
        order: The parameters' indices in the order in which backward has their gradients; None: last parameter first.
    """
    specs = tuple(specs)
    order = range(len(specs))[::-1] if order is None else order
    turns = {index: turn for turn, index in enumerate(order)}
    kinds: dict[Hashable, list[list[int]]] = {}
    for unit in units(specs, order):
        kinds.setdefault(kind(specs[unit[0]]), []).append(unit)
    nbytes = [padded(spec) for spec in specs]
    filled = [bucket for each in kinds.values() for bucket in fill(each, nbytes, bucket_bytes, first_bytes, last_bytes)]
    return lay_out(specs, sorted(filled, key=lambda bucket: turns[bucket[0]]))


def kind(spec: Spec) -> Hashable:
    """What all parameters of a bucket have in common."""
    return spec.dtype, spec.device, bool(spec.lossy)


def fill(
    units: Sequence[Sequence[int]], nbytes: Sequence[int], bucket_bytes: int, first_bytes: int, last_bytes: int
) -> list[list[int]]:
    """Distribute units over buckets of at least bucket_bytes; the first has first_bytes, the last may be short.

    The unit that fills a bucket belongs to it, however large the unit is: a few small gradients before a large one are
    not worth a request of their own. If less than 2 * last_bytes remain before the last bucket, they are not either.

    Args:
        units: Parameters that stay together, by index, in the order in which their gradients come.
        nbytes: The padded size of each parameter.
        bucket_bytes: The least size of a bucket.
        first_bytes: The least size of the first bucket.
        last_bytes: See `start_of_last`.
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
    """Return the number of the unit with which the last bucket begins; len(sizes) if there is no special last bucket.

    No backward hides the last bucket's communication, so the last bucket is as short as last_bytes allows. It may be a
    quarter longer: a weight's bias is added to it, rather than keep another bucket waiting. There is no special last
    bucket if last_bytes is 0, or if the units before it would not fill a first bucket.
    """
    behind = list(accumulate(reversed(sizes)))  # bytes of the last unit, of the last two, ...
    needed = bisect_left(behind, last_bytes)
    if not last_bytes or needed == len(behind):
        return len(sizes)
    count = bisect_right(behind, behind[needed] + last_bytes // 4)
    return len(sizes) - count if behind[-1] - behind[count - 1] >= first_bytes else len(sizes)


def units(specs: Sequence[Spec], indices: Sequence[int]) -> list[list[int]]:
    """Combine parameters that must stay together: single parameters, and groups at the place of their first member."""
    found: dict[Hashable, list[int]] = {}
    for index in indices:
        spec = specs[index]
        key = index if spec.group is None else (spec.group, kind(spec))
        found.setdefault(key, []).append(index)
    return list(found.values())


def padded(spec: Spec) -> int:
    """The bytes of a parameter's slot, in whole cache lines: so two ranks never write to one line at once."""
    return -(-spec.length * np.dtype(spec.dtype).itemsize // LINE) * LINE


def lay_out(specs: Sequence[Spec], filled: Sequence[Sequence[int]]) -> BucketPlan:
    """Give each bucket its place in its device's arena, and each parameter its place in its bucket."""
    slots: dict[int, Slot] = {}
    buckets: list[Bucket] = []
    ends: dict[str, int] = {}
    for number, members in enumerate(filled):
        first = specs[members[0]]
        dtype, device = np.dtype(first.dtype), first.device
        offset = 0
        for index in members:
            slots[index] = Slot(number, offset // dtype.itemsize, specs[index].length)
            offset += padded(specs[index])
        start = ends.get(device, 0)
        buckets.append(Bucket(dtype, device, start, offset // dtype.itemsize, tuple(members), bool(first.lossy)))
        ends[device] = start + offset
    return BucketPlan(tuple(specs), tuple(slots[index] for index in range(len(specs))), tuple(buckets))
