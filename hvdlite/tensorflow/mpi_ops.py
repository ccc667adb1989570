"""`horovod.tensorflow.mpi_ops` under hvdlite: imports only, no code of its own."""

from hvdlite.api import names
from hvdlite.api.names import *  # noqa: F403
from hvdlite.common.basics import HorovodBasics
from hvdlite.tensorflow.facts import (
    gpu_available,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdlite.tensorflow.functions import broadcast_
from hvdlite.tensorflow.movement import allgather, alltoall, broadcast, grouped_allgather
from hvdlite.tensorflow.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter

_basics = HorovodBasics()

__all__ = [
    *names.__all__, "allgather", "allreduce", "alltoall", "broadcast", "broadcast_", "gpu_available",
    "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "join", "local_rank_op", "local_size_op",
    "process_set_included_op", "rank_op", "reducescatter", "size_op",
]  # fmt: skip
