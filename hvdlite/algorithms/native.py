"""The MPI library's own all-reduce, for comparison and for networks that reduce in hardware.

It runs only if the user chooses it (HVDLITE_ALGORITHM=native).
"""

from __future__ import annotations

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def native(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """Reduce with MPI_Allreduce, in place. The library decides cost and rounding.

    The MPI standard recommends the same bits on every rank and in every run, but does not require them.

    Args:
        transport: The ranks that take part.
        buffer: Flat, contiguous, of a dtype that `choose` allows.
        scratch: Unused.
        reduction: The operation and its scaling.
    """
    reduction.prescale(buffer)
    transport.native_allreduce(buffer, reduction.operation)
    reduction.postscale(buffer)
