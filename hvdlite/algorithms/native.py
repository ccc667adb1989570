"""The transport's own all-reduce: MPI's on the host, NCCL's on a GPU.

It is for comparison, and for networks that reduce in hardware. It runs only if the user chooses it:
HVDLITE_ALGORITHM=native for arrays on the host, HVDLITE_GPU_OPERATIONS=nccl for arrays on a GPU. A ring replaces it for
dtypes that the library cannot add, or adds differently (`choice`). A ring also replaces MPI's minima and maxima of
floats.
"""

from __future__ import annotations

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.transports import Transport


def native(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """Reduce with MPI_Allreduce, in place. The library decides cost and rounding.

    The MPI standard recommends the same bits on every rank and in every run, but does not require them. The library
    shows no bytes: each rank counts 2n(p-1)/p to the next rank, as in a ring.

    Args:
        transport: The ranks that take part.
        buffer: Flat, contiguous, of a dtype that `choose` allows.
        scratch: Unused.
        reduction: The operation and its scaling.
    """
    size = transport.size
    transport.tally.to((transport.rank + 1) % size, 2 * buffer.nbytes * (size - 1) // size)
    reduction.prescale(buffer)
    transport.native_allreduce(buffer, reduction.operation)
    reduction.postscale(buffer)
