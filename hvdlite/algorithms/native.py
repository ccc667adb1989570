"""The MPI's own all-reduce, for comparison and for networks that reduce in hardware. Only the user chooses it."""

from __future__ import annotations

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def native(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """MPI_Allreduce in place. The library decides cost and rounding.

    The MPI standard recommends the same bits on every rank and run, but does not promise them. buffer: flat,
    contiguous, changed in place, of a dtype that `choose` allows. scratch: unused.
    """
    reduction.prescale(buffer)
    transport.native_allreduce(buffer, reduction.operation)
    reduction.postscale(buffer)
