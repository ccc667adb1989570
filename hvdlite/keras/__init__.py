"""Horovod's names for Keras 3, on every backend: `import hvdlite.keras as hvd`."""

from hvdlite.build import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hvdlite.keras import callbacks, elastic
from hvdlite.keras._backends import border
from hvdlite.keras.functions import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdlite.keras.models import load_model
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdlite.keras.sync_batch_norm import SyncBatchNormalization
from hvdlite.membership import add_process_set, remove_process_set
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.ops import Adasum, Average, Sum
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
from hvdlite.tracing import start_timeline, stop_timeline

Compression = border().Compression

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
