"""A bucket at work: its memory, and the reduction that runs on the lane.

    this rank's buffer       [ copied | part | copied ]
    this rank's gradients             [ lent ]

On one host, each of p ranks adds up one p-th of all buffers: its part. Other ranks never read that part of this rank's
buffer. So large gradients there are lent, not copied: the algorithm reads them where they lie. Other ranks read the
rest, so it is copied. With 2 ranks this saves half of an MLP's copies (MEASURED.md).

With a lossy compressor, hosts exchange compressed sums (`lossy`). If each rank needs a part of the results only
(`BucketPlan.borders`), a bucket is reduced and scattered, and nothing is lent.

In the walk of a gradient, the reducer has one `Bucket` for each bucket of the plan. A full bucket leaves as a request
on the lane. Once all ranks have agreed, the lane calls `Bucket.reduce`, which runs the algorithm in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvdlite.algorithms import allreduce, prepared, prepared_in_arena, to_lend
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.gradients.lossy import LossyBucket
from hvdlite.gradients.plan import Slot
from hvdlite.gradients.scatter import prepared_scatter
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.stand_in import Zeros


class Bucket:
    """The memory of one bucket on this rank and on the host's other ranks, and its reduction.

    Attributes:
        buffer: This rank's flat array.
        peers: The flat arrays of the host's ranks; None where ranks do not share memory.
        how: The arithmetic.
        part: The elements, from and to, that only this rank reads.
        parts: For each rank the elements whose result it needs; None if all ranks need all.
        lossy: Compresses the bucket between hosts; None: it is reduced exactly.
        lent: Addends that lie elsewhere, by their first element counted from the beginning of the part.
        run: The prepared reduction; None before the first round.
    """

    def __init__(
        self,
        buffer: Array,
        peers: Sequence[Array] | None,
        how: Reduction,
        lane: Lane,
        parts: Sequence[Sequence[slice]] | None,
        lossy: LossyBucket | None = None,
    ) -> None:
        self.buffer, self.peers = buffer, peers
        self.how, self.parts, self.lossy = how, parts, lossy
        lends = peers and parts is None and lossy is None
        self.part = to_lend(lane.transport, lane.place, buffer, how) if lends else (0, 0)
        self.lent: dict[int, Array] = {}
        self.run: Callable[[], None] | None = None

    def reduce(self, at: Workplace) -> bool:
        """Reduce the buffer in place, on the lane.

        Returns:
            Whether all ranks took part. False if a stand-in took the place of a rank that has joined.
        """
        if at.some_joined:
            self.take_in()
            allreduce(at.transport, at.workspace, at.place, self.buffer, self.how)
            return False
        if self.run is None:
            self.run = self.prepared(at)
        self.run()
        return True

    def prepared(self, at: Workplace) -> Callable[[], None]:
        """Bind the algorithm's arguments."""
        site = at.transport, at.workspace, at.place
        if self.lossy is not None:
            return self.lossy.prepared(self.buffer, self.peers, self.how)
        if self.parts is not None:
            return prepared_scatter(at, self.buffer, self.peers, self.parts, self.how)
        if self.peers is None:
            return prepared(*site, self.buffer, self.how)
        return prepared_in_arena(*site, self.peers, self.how, self.lent)

    def to_lend(self, slot: Slot) -> tuple[int, int]:
        """The elements, from and to, of the gradient in this slot that may be lent."""
        start, stop = (min(max(edge - slot.offset, 0), slot.length) for edge in self.part)
        return start, stop

    def lend(self, slot: Slot, array: Array) -> None:
        """Read the elements `to_lend` of a gradient from another array until `return_lent`.

        Args:
            slot: The gradient's slot.
            array: The elements, flat.
        """
        self.lent[slot.offset + self.to_lend(slot)[0] - self.part[0]] = array

    def return_lent(self) -> None:
        """Forget all lent arrays."""
        self.lent.clear()

    def take_in(self) -> None:
        """Copy all lent elements into the buffer."""
        for start, array in self.lent.items():
            self.buffer[self.part[0] + start :][: array.size] = array

    def stand_in(self) -> Zeros:
        return Zeros.like([self.buffer], self.how)
