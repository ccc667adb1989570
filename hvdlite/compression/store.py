"""`Store`: what lossy compression keeps from one round to the next, by parameter name, in one memory per host.

    half 0   [ w1: residual | velocity | extra ][ w2: ... ]     one half holds the last committed round,
    half 1   [ w1: residual | velocity | extra ][ w2: ... ]     the round under way writes the other one

All drivers of a host share the memory, and each writes its own pieces. `commit` swaps the halves of its parameters. A
round that fails, or has results that are not finite, is not committed: it changes nothing. Names outlive plans:
parameters may be frozen and come back, and drivers' parts may move.

Residuals are in units of the host's sum of gradients, without a loss scale. Price: twice 4 bytes per element and host;
the double with momentum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from hvdlite.arrays import LINE
from hvdlite.compression import Compressor, Piece
from hvdlite.memory.arena import one_per_host, typed
from hvdlite.system.user_warnings import say_once
from hvdlite.transports import Transport


@dataclass(frozen=True)
class Entry:
    """One parameter's memory.

    Attributes:
        shape: The parameter's shape.
        dtype: float32 or float64, by name.
        start: The first byte, counted in a half.
        lengths: The elements of residual, velocity and extra.
    """

    shape: tuple[int, ...]
    dtype: str
    start: int
    lengths: tuple[int, int, int]

    @property
    def nbytes(self) -> int:
        """The bytes of the parameter's memory, in whole cache lines."""
        return -(-sum(self.lengths) * np.dtype(self.dtype).itemsize // LINE) * LINE


@dataclass(frozen=True)
class Kept:
    """One parameter's arrays in one half, flat. An array that the compressor does not need is empty.

    Attributes:
        residual: The gradients that have not been sent.
        velocity: The sums of momentum correction.
        extra: What the compressor keeps.
    """

    NAMES: ClassVar[tuple[str, ...]] = ("residual", "velocity", "extra")
    residual: np.ndarray
    velocity: np.ndarray
    extra: np.ndarray

    def of(self, piece: Piece) -> Kept:
        """A driver's piece of the arrays. `extra` stays whole."""
        part = slice(piece.first, piece.first + piece.length)
        return Kept(self.residual[part], self.velocity[part], self.extra)

    @property
    def lengths(self) -> tuple[int, int, int]:
        """The numbers of elements."""
        return self.residual.size, self.velocity.size, self.extra.size

    def take(self, other: Kept) -> None:
        """Copy the values of equally long arrays."""
        self.residual[...] = other.residual
        self.velocity[...] = other.velocity
        self.extra[...] = other.extra


@dataclass(frozen=True)
class Saved:
    """The committed values, outside shared memory.

    Attributes:
        host: The number of the host that the values are of; None for the sum over all hosts.
        hosts: The number of hosts.
        rounds: The number of committed rounds.
        values: By parameter name, the arrays.
    """

    host: int | None
    hosts: int
    rounds: int
    values: Mapping[str, Kept]

    @property
    def without_residuals(self) -> Saved:
        """The same with zeros for what has not been sent: another host has these values."""
        return replace(self, values={
            name: Kept(np.zeros_like(each.residual), np.zeros_like(each.velocity), each.extra)
            for name, each in self.values.items()
        })  # fmt: skip


@dataclass
class Scratch:
    """Memory that all parts use in turns: for values, and for what was sent."""

    arrays: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)

    def get(self, use: str, length: int, dtype: str) -> np.ndarray:
        """A flat array with undefined contents."""
        found = self.arrays.get((use, dtype))
        if found is None or found.size < length:
            found = self.arrays[use, dtype] = np.empty(length, dtype)
        part: np.ndarray = found[:length]
        return part


class Store:
    """The memory of one optimizer's lossy compression on this host. Not thread-safe.

    Attributes:
        compressor: The compressor.
        scale: Returns the loss scale of the gradients under way.
        entries: The place of each parameter.
        halves: Both halves, as bytes; empty before the first `allocate`.
        turns: By parameter name, the half of the last committed round.
        rounds: The number of committed rounds.
        hosts: This host's number, and the number of hosts.
        first_of_host: Whether this rank speaks for its host.
        loaded: A checkpoint's values, used at the next `allocate`.
        scratch: Memory that all parts use in turns.
    """

    def __init__(self, compressor: Compressor, scale: Callable[[], float]) -> None:
        self.compressor, self.scale = compressor, scale
        self.entries: dict[str, Entry] = {}
        self.halves: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.uint8), np.empty(0, np.uint8))
        self.turns: dict[str, int] = {}
        self.rounds = 0
        self.hosts = 0, 1
        self.first_of_host = True
        self.loaded: Saved | None = None
        self.scratch = Scratch()

    def before(self, name: str) -> Kept:
        """A parameter's arrays as the last committed round has left them."""
        return arrays_of(self.entries[name], self.halves[self.turns[name]])

    def after(self, name: str) -> Kept:
        """A parameter's arrays that the round under way writes."""
        return arrays_of(self.entries[name], self.halves[1 - self.turns[name]])

    def commit(self, names: Iterable[str]) -> None:
        """The round under way counts for these parameters."""
        self.rounds += 1
        for name in names:
            self.turns[name] = 1 - self.turns[name]

    # Memory

    def entry(self, shape: tuple[int, ...], dtype: str, start: int) -> Entry:
        """The place of a parameter of this shape."""
        length, how = int(np.prod(shape, dtype=np.int64)), self.compressor
        lengths = length * how.error_feedback, length * (how.momentum > 0), how.extra(shape)
        return Entry(shape, dtype, start, lengths)

    def allocate(
        self,
        wanted: Iterable[tuple[str, tuple[int, ...], str]],
        transport: Transport,
        local: Transport,
        hosts: tuple[int, int],
    ) -> None:
        """Have room for these parameters, and for all earlier ones, which keep their values. Collective.

        Args:
            wanted: The parameters' names, shapes and dtypes (float32 or float64). Equal on all ranks.
            transport: All ranks of the lane.
            local: The ranks of this host that share the memory.
            hosts: This host's number, and the number of hosts.
        """
        there = {name: (entry.shape, entry.dtype) for name, entry in self.entries.items()}
        entries: dict[str, Entry] = {}
        nbytes = 0
        for name, (shape, dtype) in {**there, **{name: (shape, dtype) for name, shape, dtype in wanted}}.items():
            entries[name] = self.entry(shape, dtype, nbytes)
            nbytes += entries[name].nbytes
        memory = one_per_host(transport, 2 * nbytes, local)
        halves = memory[:nbytes], memory[nbytes:]
        values = self.to_load(transport, hosts) or self.saved()
        for name, entry in entries.items() if local.rank == 0 else ():
            found = values.values.get(name)
            if found is not None and found.lengths == entry.lengths:
                arrays_of(entry, halves[0]).take(found)
                arrays_of(entry, halves[1]).take(found)
        transport.barrier()
        self.entries, self.halves = entries, halves
        self.hosts, self.first_of_host = hosts, local.rank == 0
        self.turns, self.rounds, self.loaded = dict.fromkeys(entries, 0), values.rounds, None

    # Checkpoints

    def saved(self) -> Saved:
        """This host's committed values. They are views of the shared memory: copy them before the next round."""
        host, hosts = self.hosts
        return Saved(host, hosts, self.rounds, {name: self.before(name) for name in self.entries})

    def load(self, state: Saved | None) -> None:
        """Use these values from the next `allocate` on. None: go on with the present ones."""
        self.loaded = state

    def summed(self, add: Callable[[np.ndarray], None]) -> Saved:
        """The sum of all hosts' committed values. Collective.

        Args:
            add: Adds up an array over all ranks, in place.
        """
        _, hosts = self.hosts
        found: dict[str, Kept] = {}
        for name in self.entries:
            mine = self.before(name)
            found[name] = Kept(mine.residual.copy(), mine.velocity.copy(), mine.extra.copy())
            for array in (found[name].residual, found[name].velocity):
                if not self.first_of_host:
                    array[...] = 0
                if array.size:
                    add(array)
        return Saved(None, hosts, self.rounds, found)

    def to_load(self, transport: Transport, hosts: tuple[int, int]) -> Saved | None:
        """Agree on a checkpoint's values. Collective.

        Returns:
            The values for this host; None if no rank has loaded any. No values, with a warning on rank 0, if the ranks'
            files are not those of all hosts: only the sum over hosts means anything.
        """
        mine = self.loaded
        kind = NOTHING if mine is None else SUM if mine.host is None or mine.hosts == 1 else OWN
        if mine and kind == OWN and (mine.host, mine.hosts) != hosts:
            kind = ANOTHERS
        kinds = set(transport.allgather_object((kind, mine.rounds if mine else 0)))
        if kinds == {(NOTHING, 0)}:
            return None
        if mine and kind in (SUM, OWN) and len(kinds) == 1:
            return mine if kind == OWN or hosts[0] == 0 else mine.without_residuals
        if transport.rank == 0:
            say_once(ONE_HOST_ONLY)
        return Saved(hosts[0], hosts[1], 0, {})


NOTHING, SUM, OWN, ANOTHERS = "nothing", "the sum over hosts", "this host's values", "another host's values"
"""What a rank has loaded."""
ONE_HOST_ONLY = (
    "the optimizer's checkpoint has the unsent gradients of one host, and each host has its own: they start anew at "
    "zero. To keep them, save with hvd.save, or save a file of each rank and load each on its rank"
)


def arrays_of(entry: Entry, half: np.ndarray) -> Kept:
    """A parameter's arrays in a half."""
    found = []
    start = entry.start
    for length in entry.lengths:
        found.append(np.asarray(typed(half, start, length, entry.dtype)))
        start += found[-1].nbytes
    return Kept(*found)
