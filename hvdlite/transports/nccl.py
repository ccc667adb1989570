"""NCCL's all-reduce through CuPy, if the user chooses it: one GPU per rank, one communicator per lane.

NCCL moves the data. The lane's transport only distributes NCCL's identifier when the communicator is made. NCCL needs
all ranks' calls in one order, and the roll call before each request guarantees that.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from types import ModuleType

from hvdlite.arrays import Array, dtype_name, nccl_of
from hvdlite.errors import HvdliteError
from hvdlite.transports import Transport

OPERATIONS = {"sum": "NCCL_SUM", "min": "NCCL_MIN", "max": "NCCL_MAX", "product": "NCCL_PROD"}


class Nccl:
    """An NCCL communicator of a transport's ranks, on each rank's current GPU. Creating one is collective.

    Raises:
        HvdliteError: On every rank, if CuPy finds no NCCL library or two ranks share a GPU.
    """

    def __init__(self, transport: Transport, xp: ModuleType) -> None:
        self.xp, self.nccl = xp, nccl_of(xp)
        number = xp.cuda.runtime.getDevice()
        mine = (socket.gethostname(), xp.cuda.runtime.deviceGetPCIBusId(number), bool(self.nccl.available))
        check(transport.allgather_object(mine))
        identity = self.nccl.get_unique_id() if transport.rank == 0 else None
        identity = transport.allgather_object(identity)[0]
        self.communicator = self.nccl.NcclCommunicator(transport.size, identity, transport.rank)

    def allreduce(self, array: Array, operation: str) -> None:
        """Reduce in place, on the current stream. Collective. array: contiguous, of a dtype that NCCL can add."""
        dtype = getattr(self.nccl, f"NCCL_{dtype_name(array.dtype).upper()}")
        how = getattr(self.nccl, OPERATIONS[operation])
        stream = self.xp.cuda.get_current_stream().ptr
        self.communicator.allReduce(array.data.ptr, array.data.ptr, array.size, dtype, how, stream)

    def close(self) -> None:
        self.communicator.destroy()


def check(cards: list[tuple[str, str, bool]]) -> None:
    """Raise HvdliteError if NCCL cannot work. cards: each rank's host and GPU, and whether CuPy finds NCCL there."""
    without = [rank for rank, (*_, available) in enumerate(cards) if not available]
    if without:
        raise HvdliteError(
            f"HVDLITE_GPU_OPERATIONS=nccl: CuPy finds no NCCL library on ranks {without}: pip install nvidia-nccl-cu12 "
            "(or -cu13) on these ranks, or remove the setting"
        )
    users = defaultdict(list)
    for rank, (host, gpu, _) in enumerate(cards):
        users[host, gpu].append(rank)
    for (host, gpu), ranks in users.items():
        if len(ranks) > 1:
            raise HvdliteError(
                f"HVDLITE_GPU_OPERATIONS=nccl needs a GPU for each rank, but ranks {ranks} share GPU {gpu} of {host}: "
                "choose one per rank with torch.cuda.set_device(hvd.local_rank()), or remove the setting"
            )
