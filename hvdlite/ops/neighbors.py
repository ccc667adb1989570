"""Weighted sums of the arrays of neighbours. A rank waits for its neighbours only, not for all ranks.

Each pair of neighbours exchanges arrays on its pair lane (`lanes.pair_lanes`), which has the agreement, the stall watch
and the end of communication. The two ranks of a pair first compare what they are about to do, in one message each.
Rejected: one message with the arrays and their description. It saves that latency, but it needs a communicator, an
order in which ranks leave, and words for errors, all of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from hvdlite.arrays import Array, DType, accumulator, as_bytes, dtype_name, is_float, is_host
from hvdlite.gpu_streams import mark, on_host
from hvdlite.job.groups import Group
from hvdlite.lanes.request import Handle, Request
from hvdlite.lanes.signature import Facts, Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.common import facts_of_array

HostArray: TypeAlias = "np.ndarray[tuple[int, ...], DType]"


@dataclass(frozen=True)
class Part:
    """What one rank does in a round: x <- own * x + sum over sources of weight * (what the source sends).

    Attributes:
        own: The weight of this rank's array.
        sources: The weight of each array that this rank receives, by the sender's place in the group.
        dests: The factor by which this rank multiplies its array for each receiver.
    """

    own: float
    sources: Mapping[int, float]
    dests: Mapping[int, float]

    def peers(self) -> list[int]:
        """Return the ranks to exchange with, ascending."""
        return sorted({*self.sources, *self.dests})


class Pack:
    """The arrays of one dtype as one buffer on the host.

    Attributes:
        mine: This rank's values.
        theirs: For each sender, memory for its values.
    """

    def __init__(self, arrays: Sequence[Array], sources: Mapping[int, float]) -> None:
        self.mine: HostArray = np.concatenate([np.asarray(on_host(array)).reshape(-1) for array in arrays])
        self.theirs = {source: np.empty_like(self.mine) for source in sources}

    def scaled(self, factor: float) -> HostArray:
        """Return this rank's values, multiplied by a factor."""
        if factor == 1.0:
            return self.mine
        wide = accumulator(self.mine.dtype)
        return np.multiply(self.mine, factor, dtype=wide).astype(self.mine.dtype)

    def combine(self, rank: int, part: Part) -> HostArray:
        """Return the weighted sum: always in the order of ranks, and 16-bit floats in float32.

        A weight of 0 leaves out a rank, whatever it has sent. The buffers are overwritten.
        """
        weights = {rank: part.own, **part.sources}
        total: HostArray = np.zeros(self.mine.size, accumulator(self.mine.dtype))
        for place in sorted(weights):
            if weights[place]:
                term = (self.mine if place == rank else self.theirs[place]).astype(total.dtype, copy=False)
                np.add(total, np.multiply(term, weights[place], out=term), out=total)
        return total.astype(self.mine.dtype, copy=False)


class Combining:
    """One round that is under way. It keeps a copy of the arrays, which may change meanwhile."""

    def __init__(self, group: Group, part: Part, arrays: Sequence[Array]) -> None:
        """
        Args:
            group: The ranks.
            part: What this rank does.
            arrays: Of floating-point dtypes.

        Raises:
            TypeError: An array has another dtype.
        """
        for array in arrays:
            if not is_float(array.dtype):
                raise TypeError(
                    f"a weighted average of {dtype_name(array.dtype)} is not possible: give float16, bfloat16, float32 "
                    "or float64"
                )
        self._group, self._part = group, part
        self._likes = [(array.dtype, array.shape) for array in arrays]
        self._packs = {
            dtype: Pack([array for array in arrays if array.dtype == dtype], part.sources)
            for dtype in dict.fromkeys(array.dtype for array in arrays)
        }
        self._handles: list[Handle[None]] = []

    def start(self, kind: str, name: str, facts: Facts, waits: bool = False) -> None:
        """Begin to exchange. Waits for nobody, unless the caller waits next.

        Args:
            kind: The operation.
            name: Equal on all ranks, and different for each round.
            facts: What neighbours must agree on, besides the arrays.
            waits: Whether the caller calls `wait` next. Then one of the exchanges runs in its thread.
        """
        peers = self._part.peers()
        for peer in peers:
            facts_here = (*facts, *self._facts(), ("messages", self._messages(peer)))
            request = Request(Signature(kind, name, facts_here), partial(self._exchange, peer))
            lane = self._group.post.lane(peer)
            self._handles.append(lane.begin(request) if waits and peer == peers[-1] else lane.submit(request))

    def _facts(self) -> Facts:
        """What the arrays are."""
        if len(self._likes) == 1:
            return facts_of_array(*self._likes[0], True, 0)[:2]
        numbers = [f"{pack.mine.size} of {dtype_name(dtype)}" for dtype, pack in self._packs.items()]
        return (("number of arrays", len(self._likes)), ("elements", ", ".join(numbers)))

    def _messages(self, peer: int) -> str:
        """What is sent between this rank and another, in the same words on both."""
        pairs = ((self._part.dests, self._group.rank, peer), (self._part.sources, peer, self._group.rank))
        ranks = self._group.ranks
        return ", ".join(sorted(f"{ranks[a]} to {ranks[b]}" for places, a, b in pairs if peer in places))

    def _exchange(self, peer: int, at: Workplace) -> None:
        """Send and receive all packs. Runs on the lane with this peer."""
        sends, receives = peer in self._part.dests, peer in self._part.sources
        for pack in self._packs.values():
            if sends and receives:
                at.transport.exchange(
                    as_bytes(pack.scaled(self._part.dests[peer])), peer, as_bytes(pack.theirs[peer]), peer
                )
            elif sends:
                at.transport.send(as_bytes(pack.scaled(self._part.dests[peer])), peer)
            else:
                at.transport.receive(as_bytes(pack.theirs[peer]), peer)

    def wait(self) -> list[Array]:
        """Wait for the neighbours. Call it once.

        Returns:
            The weighted sums, on the host, in the order of the arrays.

        Raises:
            MismatchError: A neighbour does something else; on both ranks.
            ShutdownError: A neighbour has shut down.
        """
        for handle in self._handles:
            handle.wait()
        flat = {dtype: pack.combine(self._group.rank, self._part) for dtype, pack in self._packs.items()}
        begun = dict.fromkeys(flat, 0)
        results: list[Array] = []
        for dtype, shape in self._likes:
            start = begun[dtype]
            begun[dtype] += int(np.prod(shape))
            results.append(flat[dtype][start : begun[dtype]].reshape(shape))
        return results


def overwrite(array: Array, values: Array) -> None:
    """Copy values from the host into an array. On a GPU it is contiguous, and issued work that reads it ends first."""
    if is_host(array):
        array[...] = values
    else:
        mark(array).wait()
        on_gpu: Any = as_bytes(array)  # CuPy has no bfloat16
        on_gpu.set(as_bytes(values))
