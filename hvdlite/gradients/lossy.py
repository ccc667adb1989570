"""Lossy compression of a plan's buckets between hosts.

    marked      which gradients of a plan are compressed; the others travel exactly
    allocate    memory for what is not sent, once per host
    prepared    the reduction of a bucket: exact within each host, compressed between hosts
    settle      after a round: what was not sent counts, if all results are finite

In the walk of a gradient, a compressor replaces the messages of `algorithms/hierarchical`; the room `compression/` has
the compressors. On one host nothing is compressed, because memory is faster than any compressor. With
HVDLITE_COMPRESS_WITHIN_HOST, and where ranks share no memory, each rank counts as a host of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from hvdlite.algorithms import Place, hierarchical
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import part
from hvdlite.arrays import Array, is_float
from hvdlite.compression import Compressor, Piece
from hvdlite.compression.column import Column
from hvdlite.compression.part import Part, Phases, is_finite, kept_as
from hvdlite.compression.store import Store
from hvdlite.gradients.plan import Bucket, BucketPlan, Spec
from hvdlite.lanes.workplace import Workplace
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport, threads
from hvdlite.transports.two_levels import Levels

ONE_HOST = (
    "compression={}: all ranks are on one host and share memory, so gradients are not compressed. To compress between "
    "the ranks of one host, as an experiment, set HVDLITE_COMPRESS_WITHIN_HOST=1"
)


def marked(specs: Mapping[str, Spec], store: Store, place: Place, within_host: bool) -> tuple[Spec, ...]:
    """Mark the parameters whose gradients are compressed.

    Args:
        specs: The parameters, by names under which the compressor keeps what it has not sent. A parameter has the same
            name in all plans of the store, and after a restart.
        store: The memory of the compressor.
        place: The ranks and hosts.
        within_host: Whether each rank counts as a host.

    Raises:
        NotImplementedError: A gradient lies on a GPU.
    """
    how, plain = store.compressor, tuple(specs.values())
    if place.size == 1:
        return plain
    if place.one_host and not within_host:
        say_once(ONE_HOST.format(how))
        return plain
    if on_gpu := next((spec for spec in plain if spec.device != "host"), None):
        raise NotImplementedError(
            f"compression={how} is for gradients in host memory; that of {on_gpu.name} lies on a GPU. Use "
            "hvd.Compression.bf16 or fp16 there"
        )
    return tuple(
        replace(spec, lossy=name) if is_float(np.dtype(spec.dtype)) and how.fits(spec.shape) else spec
        for name, spec in specs.items()
    )


class Stores:
    """What lossy compression keeps from round to round, for lists of variables.

    Attributes:
        how: The compressor; None without one.
        scale: Returns the loss scale of the gradients under way.
        known: The stores, by the lists that they are for.
        numbers: The variables' numbers, in the order in which they were first seen, by id().
    """

    def __init__(self, how: Compressor | None) -> None:
        self.how = how
        self.scale: Callable[[], float] = lambda: 1.0
        self.known: dict[Hashable, Store] = {}
        self.numbers: dict[int, int] = {}

    def get(self, key: Hashable) -> Store | None:
        """Find or make a store; None without a lossy compressor."""
        if self.how is not None and key not in self.known:
            self.known[key] = Store(self.how, lambda: self.scale())
        return self.known.get(key)

    def number(self, variable: object) -> int:
        """A variable's number. The names of variables need not be unique."""
        return self.numbers.setdefault(id(variable), len(self.numbers))

    def note_scale(self, scale: Callable[[], float]) -> None:
        """Have gradients scaled by this from now on."""
        self.scale = scale


class LossyRounds:
    """The compressed buckets of one plan, in all rounds.

    Attributes:
        store: What is kept from round to round.
        plan: The plan.
        within_host: Whether each rank counts as a host.
        names: The parameters whose gradients are compressed.
        buckets: The compressed buckets, by number.
        levels: The ranks that add up exactly, and the drivers that compress; known after `allocate`.
    """

    levels: Levels

    def __init__(self, store: Store, plan: BucketPlan, within_host: bool) -> None:
        self.store, self.plan, self.within_host = store, plan, within_host
        self.names = [spec.lossy for spec in plan.specs if spec.lossy]
        self.buckets = {number: LossyBucket(self, each) for number, each in enumerate(plan.buckets) if each.lossy}

    def allocate(self, at: Workplace, shared: bool) -> None:
        """Allocate what is kept from round to round. Collective. shared: whether hosts' ranks share their buckets."""
        transport, hosts = at.transport, at.place.hosts
        if self.within_host or not shared or at.place.one_host:
            self.levels, host = Levels(threads.alone(), transport, 1, 1), (transport.rank, transport.size)
        else:
            self.levels = at.workspace.levels(transport, hosts)
            host = next(number for number, ranks in enumerate(hosts) if transport.rank in ranks), len(hosts)
        wanted = (
            (each.lossy, each.shape, kept_as(np.dtype(each.dtype)).name) for each in self.plan.specs if each.lossy
        )
        self.store.allocate(wanted, transport, self.levels.local, host)

    def settle(self, results: Sequence[Array], unused: Collection[str]) -> None:
        """A round has ended on all ranks: what was not sent counts, if all results are finite. Waits for nobody.

        All ranks have the same results, and so decide alike.

        Args:
            results: The buckets' buffers, in the plan's order.
            unused: The names of parameters without a gradient on any rank. Users get no result for them.
        """
        for number, result in enumerate(results):
            bucket = self.buckets.get(number)
            looked_at = result if bucket is None else result[bucket.firsts]
            if is_float(result.dtype) and not is_finite(np.asarray(looked_at)):
                return
        for bucket in self.buckets.values() if unused else ():
            bucket.keep(unused.__contains__)
        self.store.commit(self.names)


class LossyBucket:
    """One compressed bucket.

    Attributes:
        all: The compressed buckets of the plan.
        planned: The bucket.
        borders: The borders of the drivers' parts, in elements.
        part: This rank's part; None before the first round, and if this rank is no driver.
        phases: What the last round has done, for the timeline.
    """

    def __init__(self, every: LossyRounds, planned: Bucket) -> None:
        self.all, self.planned = every, planned
        self.borders: list[int] = []
        self.part: Part | None = None
        self.phases: Phases = []

    @property
    def firsts(self) -> list[int]:
        """The first element of each driver's part. If one result of a part is not finite, all of the part is NaN."""
        return [start for start, stop in pairwise(self.borders) if start < stop]

    def prepared(self, buffer: Array, peers: Sequence[Array] | None, how: Reduction) -> Callable[[], None]:
        """A function that reduces the bucket, for many calls. Runs on the lane.

        Args:
            buffer: This rank's buffer.
            peers: The buffers of the host's ranks, in rank order; None if they share no memory.
            how: The operation and its scaling.
        """
        levels = self.all.levels
        self.borders = self.borders_of(buffer, levels.drivers)

        def between(cross: Transport, values: Array, across: Reduction) -> Callable[[], None]:
            pieces = self.pieces(*self.borders[levels.local.rank :][:2])
            self.part = Part(self.all.store, Column(cross), pieces, values, across, self.phases)
            return self.part

        buffers = peers if peers and levels.local.size > 1 else [buffer]
        return hierarchical.prepared(levels, buffers, how, between, self.borders)

    def borders_of(self, buffer: Array, drivers: int) -> list[int]:
        """The borders of the drivers' parts; between parameters only, if the compressor needs whole ones."""
        starts = [part(buffer, drivers, driver)[0] for driver in range(drivers)]
        if self.all.store.compressor.whole:
            edges = [self.all.plan.slots[index].offset for index in self.planned.members]
            starts = [min(edges, key=lambda edge: abs(edge - start)) for start in starts]
        return [*starts, buffer.size]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The parameters in a part of the bucket."""
        found = []
        for index in self.planned.members:
            spec, slot = self.all.plan.specs[index], self.all.plan.slots[index]
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.length)
            if first < last:
                found.append(Piece(spec.lossy, spec.shape, first - start, first - slot.offset, last - first))
        return found

    def keep(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Leave what was not sent of these parameters for the next round: this round's results do not contain it."""
        if self.part:
            self.part.keep(chosen)
