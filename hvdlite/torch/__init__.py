"""Horovod's names for PyTorch: `import hvdlite.torch as hvd`."""

from hvdlite.errors import HvdliteError as HorovodInternalError
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.ops import Adasum, Average, Max, Min, Product, Sum
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.runtime import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from hvdlite.torch.compression import Compression
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters, broadcast_variables
from hvdlite.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    poll,
    synchronize,
)
from hvdlite.torch.optimizer import DistributedOptimizer

__all__ = [
    "Adasum", "Average", "Compression", "DistributedOptimizer", "HorovodInternalError", "Max", "Min", "ProcessSet",
    "Product", "Sum", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "barrier", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters", "broadcast_variables",
    "cross_rank",
    "cross_size", "global_process_set", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_",
    "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "poll", "rank", "shutdown", "size",
    "synchronize",
]  # fmt: skip
