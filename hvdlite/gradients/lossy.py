"""Lossy compression of a plan's buckets between hosts.

    marked      which gradients of a plan are compressed; the others travel exactly
    allocate    memory for what is not sent, once per host
    prepared    the reduction of a bucket: exact within each host, compressed between hosts
    settle      after a round: what was not sent counts, if all results are finite

In the walk of a gradient, a compressor replaces the messages of `algorithms/hierarchical`; the room `compression/` has
the compressors. On one host nothing is compressed, because memory is faster than any compressor. With
HVDLITE_COMPRESS_WITHIN_HOST, and where ranks share no memory, each rank counts as a host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Protocol
from weakref import ref

import numpy as np

from hvdlite.algorithms import Place, hierarchical
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import borders
from hvdlite.arrays import Array, is_float
from hvdlite.compression import Compressor, Piece
from hvdlite.compression.auto import Auto
from hvdlite.compression.column import Column
from hvdlite.compression.part import Part, Phases, Section, is_finite, kept_as
from hvdlite.compression.saved import Saved
from hvdlite.compression.store import Store
from hvdlite.gradients.plan import Bucket, BucketPlan, Spec
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import common_name, inside, is_variable
from hvdlite.job import runtime
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import Arena
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport, threads
from hvdlite.transports.two_levels import Levels

ONE_HOST = (
    "compression={}: all ranks are on one host and share memory, so gradients are not compressed. To compress between "
    "the ranks of one host, as an experiment, set HVDLITE_COMPRESS_WITHIN_HOST=1 [HVD421]"
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
    on_gpu = next((spec for spec in plain if spec.device != "host"), None)
    if isinstance(how, Auto) and (on_gpu or (place.one_host and not within_host)):
        return plain
    if place.one_host and not within_host:
        if runtime.rank() == 0:
            say_once(ONE_HOST.format(how))
        return plain
    if on_gpu:
        raise NotImplementedError(
            f"compression={how} is for gradients in host memory; that of {on_gpu.name} lies on a GPU. Use "
            "hvd.Compression.bf16 or fp16 there"
        )
    return tuple(
        replace(spec, lossy=name) if is_float(np.dtype(spec.dtype)) and how.fits(spec.shape) else spec
        for name, spec in specs.items()
    )


def shape_in_memory(spec: Spec) -> tuple[int, ...]:
    """A gradient's shape with its dimensions in the order of memory: (n, h, w, c) for channels_last."""
    if not spec.strides:
        return spec.shape
    order = sorted(range(len(spec.shape)), key=lambda dimension: -spec.strides[dimension])
    return tuple(spec.shape[dimension] for dimension in order)


OPTIMIZER = "optimizer"
"""The key of an optimizer's only store."""


class Stores:
    """What lossy compression keeps from round to round, for lists of variables.

    A variable has a number of its own as long as it lives. Python may give the id() of a dead variable to a new one,
    whose gradients must not get what was left of the dead one's.

    Attributes:
        how: The compressor; None without one.
        scale: The loss scale of the gradients under way.
        known: The stores, by the lists that they are for.
        seen: The variables in the order of their numbers, held weakly.
        numbers: The variables' numbers, by id().
    """

    def __init__(self, how: Compressor | None) -> None:
        self.how = how
        self.scale = 1.0
        self.known: dict[Hashable, Store] = {}
        self.seen: list[ref[object]] = []
        self.numbers: dict[int, int] = {}

    def get(self, key: Hashable) -> Store | None:
        """Find or make a store; None without a lossy compressor."""
        if self.how is not None and key not in self.known:
            self.known[key] = Store(self.how, lambda: self.scale)
        return self.known.get(key)

    def load(self, state: Saved) -> None:
        """Have an optimizer's compression go on with a checkpoint's values."""
        if store := self.get(OPTIMIZER):
            store.load(state)

    def holding(self, names: tuple[str, ...]) -> Store | None:
        """Find the store that keeps any of these names, or make one; None without a lossy compressor."""
        found = (store for store in self.known.values() if not store.entries.keys().isdisjoint(names))
        return next(found, None) or self.get(names)

    def drop(self, used: Collection[Store | None]) -> None:
        """Forget all stores but these."""
        self.known = {key: store for key, store in self.known.items() if store in used}

    def names(self, variables: Sequence[Variable]) -> tuple[str, ...]:
        """The names of variables in stores, each of one variable only; none without a lossy compressor."""
        if self.how is None:
            return ()
        return tuple(f"{self.number(variable)} {common_name(variable)}" for variable in variables)

    def number(self, variable: Variable) -> int:
        """A variable's number. A Keras variable has that of the framework's variable inside it, if there is one."""
        own = inside(variable)
        own = own if is_variable(own) else variable  # JAX has an array there, another one after each step
        number = self.numbers.get(id(own))
        if number is None or self.seen[number]() is not own:
            number = self.numbers[id(own)] = len(self.seen)
            self.seen.append(ref(own))
        return number

    def hold_scale(self, scale: float) -> None:
        """Have gradients scaled by this number from now on."""
        self.scale = scale


class AnyPart(Protocol):
    """A driver's part of a bucket between hosts.

    Attributes:
        column: One driver of each host.
        sent_bytes: The bytes that this rank has sent in the last round.
        unsent: The norm of what has not been sent, divided by that of the host's sum of gradients; None without it.
    """

    @property
    def unsent(self) -> float | None: ...
    @property
    def column(self) -> Column: ...
    @property
    def sent_bytes(self) -> int: ...
    def __call__(self) -> None:
        """Replace the part by its sum over hosts. Collective over the column."""


class LossyRounds:
    """The compressed buckets of one plan, in all rounds.

    Attributes:
        store: What is kept from round to round.
        plan: The plan.
        within_host: Whether each rank counts as a host.
        names: The parameters whose gradients are compressed.
        buckets: The compressed buckets, by number.
        levels: The ranks that add up exactly, and the drivers that compress; known after `allocate`.
        hosts: The number of hosts; known after `allocate`.
    """

    levels: Levels
    hosts: int

    def __init__(self, store: Store, plan: BucketPlan, within_host: bool) -> None:
        self.store, self.plan, self.within_host = store, plan, within_host
        self.names = [spec.lossy for spec in plan.specs if spec.lossy]
        self.buckets = {number: LossyBucket(self, each) for number, each in enumerate(plan.buckets) if each.lossy}

    def allocate(self, at: Workplace, arenas: Iterable[Arena]) -> None:
        """Allocate what is kept from round to round. Collective. arenas: the buckets' memory."""
        host = self.place(at, arenas)
        compressed = [spec for spec in self.plan.specs if spec.lossy]
        wanted = [(spec.lossy, shape_in_memory(spec), kept_as(np.dtype(spec.dtype)).name) for spec in compressed]
        self.store.allocate(wanted, at.transport, self.levels.local, host)

    def place(self, at: Workplace, arenas: Iterable[Arena]) -> tuple[int, int]:
        """Find hosts and drivers. Returns this host's number, and the number of hosts."""
        transport, hosts = at.transport, at.place.hosts
        shared = at.place.in_memory and all(arena.peers is not None for arena in arenas)
        if self.within_host or not shared or at.place.one_host:
            self.levels = Levels(threads.alone(), transport, 1, 1)
            self.hosts = transport.size
            return transport.rank, self.hosts
        self.levels, self.hosts = at.workspace.levels(transport, hosts), len(hosts)
        return next(number for number, ranks in enumerate(hosts) if transport.rank in ranks), self.hosts

    def part(self, column: Column, section: Section) -> AnyPart:
        """The all-reduce of a driver's part, for many rounds."""
        return Part(self.store, column, section)

    def settle(self, results: Sequence[Array], unused: Collection[str], agree: Callable[[np.ndarray], None]) -> None:
        """A round has ended on all ranks: what was not sent counts, if all results are finite. Waits for nobody here.

        All ranks have the same results, and so decide alike.

        Args:
            results: The buckets' buffers, in the plan's order.
            unused: The names of parameters without a gradient on any rank. Users get no result for them, so that
                what was not sent before stays.
            agree: Adds up an array over all ranks, in place. Collective.
        """
        if not self.names:
            return
        for number, result in enumerate(results):
            bucket = self.buckets.get(number)
            looked_at = result if bucket is None else result[bucket.firsts]
            if is_float(result.dtype) and not is_finite(np.asarray(looked_at)):
                return
        self.store.commit(name for name in self.names if name not in unused)


class LossyBucket:
    """One compressed bucket.

    Attributes:
        rounds: The compressed buckets of the plan.
        planned: The bucket.
        borders: The borders of the drivers' parts, in elements.
        part: This rank's part; None before the first round, and if this rank is no driver.
        phases: What the last round has done, for the timeline.
    """

    def __init__(self, rounds: LossyRounds, planned: Bucket) -> None:
        self.rounds, self.planned = rounds, planned
        self.borders: list[int] = []
        self.part: AnyPart | None = None
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
        levels = self.rounds.levels
        self.borders = self.borders_of(buffer, levels.drivers)
        within, _ = hierarchical.of_levels(how, buffer, levels.fullest)

        def between(cross: Transport, values: Array, across: Reduction) -> Callable[[], None]:
            pieces = self.pieces(*self.borders[levels.local.rank :][:2])
            section = Section(pieces, values, across, within.before / within.divisor, self.phases)
            self.part = self.rounds.part(Column(cross), section)
            return self.part

        buffers = peers if peers and levels.local.size > 1 else [buffer]
        return hierarchical.prepared(levels, buffers, how, between, self.borders)

    def borders_of(self, buffer: Array, drivers: int) -> list[int]:
        """The borders of the drivers' parts; between parameters only, if the compressor needs whole ones."""
        *starts, end = borders(buffer, drivers)
        if self.rounds.store.compressor.whole:
            edges = [self.rounds.plan.slots[index].offset for index in self.planned.members]
            starts = [min(edges, key=lambda edge: abs(edge - start)) for start in starts]
        return [*starts, end]

    def pieces(self, start: int, stop: int) -> list[Piece]:
        """The parameters in a part of the bucket."""
        found = []
        for index in self.planned.members:
            spec, slot = self.rounds.plan.specs[index], self.rounds.plan.slots[index]
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.length)
            if first < last:
                found.append(Piece(spec.lossy, shape_in_memory(spec), first - start, first - slot.offset, last - first))
        return found
