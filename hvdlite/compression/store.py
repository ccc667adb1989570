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

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from hvdlite.arrays import LINE
from hvdlite.compression import Compressor
from hvdlite.compression.saved import Kept, Saved, agree
from hvdlite.memory.arena import one_per_host, typed
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
        committed: The parameters of the last commit.
        hosts: This host's number, and the number of hosts.
        first_of_host: Whether this rank speaks for its host.
        loaded: A checkpoint's values. The next `allocate` uses them, and clears this.
        scratch: Memory that all parts use in turns.
    """

    def __init__(self, compressor: Compressor, scale: Callable[[], float]) -> None:
        self.compressor, self.scale = compressor, scale
        self.entries: dict[str, Entry] = {}
        self.halves: tuple[np.ndarray, np.ndarray] = (np.empty(0, np.uint8), np.empty(0, np.uint8))
        self.turns: dict[str, int] = {}
        self.rounds = 0
        self.committed: tuple[str, ...] = ()
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
        self.committed = tuple(names)
        for name in self.committed:
            self.turns[name] = 1 - self.turns[name]

    def take_back(self) -> None:
        """The last committed round does not count: its step will be left out. No other round may have begun since."""
        for name in self.committed:
            self.turns[name] = 1 - self.turns[name]
        self.rounds, self.committed = self.rounds - 1, ()

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
        """Have room for these parameters, and for all that any rank knows of, which keep their values. Collective.

        Args:
            wanted: The parameters' names, shapes and dtypes (float32 or float64). Equal on all ranks.
            transport: All ranks of the lane.
            local: The ranks of this host that share the memory.
            hosts: This host's number, and the number of hosts.
        """
        before = self.saved()
        values = agree(self.loaded, hosts, transport) or before
        known = {
            name: (kept.shape, kept.residual.dtype.name) for name, kept in {**values.values, **before.values}.items()
        }
        everyone = transport.allgather_object((values.rounds, known))
        rooms = {name: room for _, each in everyone for name, room in each.items()}
        rooms |= {name: (shape, dtype) for name, shape, dtype in wanted}
        entries: dict[str, Entry] = {}
        nbytes = 0
        for name, (shape, dtype) in rooms.items():
            entries[name] = self.entry(shape, dtype, nbytes)
            nbytes += entries[name].nbytes
        memory = one_per_host(transport, 2 * nbytes, local)
        halves = memory[:nbytes], memory[nbytes:]
        for name, entry in entries.items() if local.rank == 0 else ():
            found, new = values.values.get(name), [arrays_of(entry, half) for half in halves]
            if found is not None and found.form == new[0].form:
                for each in new:
                    each.take(found)
        transport.barrier()
        self.entries, self.halves, self.turns = entries, halves, dict.fromkeys(entries, 0)
        self.hosts, self.first_of_host = hosts, local.rank == 0
        self.rounds, self.loaded = max(rounds for rounds, _ in everyone), None

    # Checkpoints

    def saved(self) -> Saved:
        """This host's committed values. They are views of the shared memory: copy them before the next round."""
        return Saved(*self.hosts, self.rounds, {name: self.before(name) for name in self.entries})

    def load(self, state: Saved | None) -> None:
        """Use these values from the next `allocate` on. None: go on with the present ones."""
        self.loaded = state

    def summed(self, add: Callable[[np.ndarray], None]) -> Saved:
        """The sum of all hosts' committed values. Collective.

        Args:
            add: Adds up an array over all ranks, in place.
        """
        found = {name: self.before(name).copy(residuals=self.first_of_host) for name in self.entries}
        for kept in found.values():
            for array in (kept.residual, kept.velocity):
                if array.size:
                    add(array)
        return Saved(None, self.hosts[1], self.rounds, found)


def arrays_of(entry: Entry, half: np.ndarray) -> Kept:
    """A parameter's arrays in a half."""
    found = []
    start = entry.start
    for length in entry.lengths:
        found.append(np.asarray(typed(half, start, length, entry.dtype)))
        start += found[-1].nbytes
    return Kept(entry.shape, *found)
