"""The MPI's own all-reduce, for comparison and for networks that do it in hardware. Chosen by the user only."""

from __future__ import annotations

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def native(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """MPI_Allreduce in place. Cost and rounding are the library's; the MPI standard recommends, but does not promise,
    the same bits on every rank and run.

    buffer: flat, contiguous, changed in place, of a dtype that `choose` gives it. scratch: unused.
    """
    reduction.prescale(buffer)
    transport.native_allreduce(buffer, reduction.operation)
    reduction.postscale(buffer)
