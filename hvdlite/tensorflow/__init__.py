"""Horovod's names for TensorFlow: `import hvdlite.tensorflow as hvd`."""

import importlib
from typing import Any

from hvdlite import names
from hvdlite.build import check_num_rank_power_of_2, split_list
from hvdlite.names import *  # noqa: F403
from hvdlite.tensorflow.aggregation import LocalGradientAggregationHelper
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.facts import (
    gpu_available,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    size_op,
)
from hvdlite.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdlite.tensorflow.movement import allgather, alltoall, broadcast, grouped_allgather
from hvdlite.tensorflow.optimizer import DistributedOptimizer
from hvdlite.tensorflow.reductions import allreduce, grouped_allreduce, grouped_reducescatter, reducescatter
from hvdlite.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    *names.__all__, "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer",
    "LocalGradientAggregationHelper", "PartialDistributedGradientTape", "allgather", "allgather_object", "allreduce",
    "alltoall", "broadcast", "broadcast_", "broadcast_global_variables", "broadcast_object", "broadcast_object_fn",
    "broadcast_variables", "check_num_rank_power_of_2", "gpu_available", "grouped_allgather", "grouped_allreduce",
    "grouped_reducescatter", "join", "local_rank_op", "local_size_op", "process_set_included_op", "rank_op",
    "reducescatter", "size_op", "split_list",
    "SyncBatchNormalization", "elastic",  # noqa: F405  (see __getattr__)
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """`elastic` is loaded when it is asked for: it needs hvdlite.keras, which needs this module."""
    if name == "SyncBatchNormalization":
        from hvdlite.keras.sync_batch_norm import SyncBatchNormalization

        return SyncBatchNormalization
    if name == "elastic":
        return importlib.import_module("hvdlite.tensorflow.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
