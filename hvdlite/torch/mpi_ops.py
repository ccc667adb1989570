"""`horovod.torch.mpi_ops` under hvdlite: imports only, no code of its own."""

from hvdlite.api import names
from hvdlite.api.names import *  # noqa: F403
from hvdlite.common.basics import HorovodBasics
from hvdlite.ops.handles import poll, synchronize
from hvdlite.torch.joining import join
from hvdlite.torch.messages import recv, recv_async, send, send_async
from hvdlite.torch.movement import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from hvdlite.torch.neighbors import hierarchical_neighbor_allreduce, neighbor_allreduce
from hvdlite.torch.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    reduce,
    reduce_async,
)
from hvdlite.torch.scattering import (
    gather,
    gather_async,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    scatter,
    scatter_async,
)
from hvdlite.torch.sparse import sparse_allreduce_async

_basics = HorovodBasics()

__all__ = [
    *names.__all__, "allgather", "allgather_async", "allreduce", "allreduce_", "allreduce_async", "allreduce_async_",
    "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "gather", "gather_async", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "hierarchical_neighbor_allreduce", "join", "neighbor_allreduce", "poll", "recv",
    "recv_async", "reduce", "reduce_async", "reducescatter", "reducescatter_async", "scatter", "scatter_async", "send",
    "send_async", "sparse_allreduce_async", "synchronize",
]  # fmt: skip
