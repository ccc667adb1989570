"""Horovod's names for TensorFlow: `import hvdlite.tensorflow as hvd`."""

import importlib
from typing import Any

from hvdlite.api.build import check_num_rank_power_of_2, split_list
from hvdlite.api.names import *  # noqa: F403  (mpi_ops has them; type checkers see them here)
from hvdlite.api.output import print as print  # not in __all__
from hvdlite.checkpoints.archive import load, save
from hvdlite.ops import barrier
from hvdlite.tensorflow import mpi_ops
from hvdlite.tensorflow.aggregation import LocalGradientAggregationHelper
from hvdlite.tensorflow.compression import Compression
from hvdlite.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from hvdlite.tensorflow.mpi_ops import *  # noqa: F403
from hvdlite.tensorflow.optimizer import DistributedOptimizer
from hvdlite.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

__all__ = [
    *mpi_ops.__all__, "BroadcastGlobalVariablesHook", "Compression", "DistributedGradientTape", "DistributedOptimizer",
    "LocalGradientAggregationHelper", "PartialDistributedGradientTape", "allgather_object", "barrier",
    "broadcast_global_variables", "broadcast_object", "broadcast_object_fn", "broadcast_variables",
    "check_num_rank_power_of_2", "load", "save", "split_list",
    "SyncBatchNormalization", "elastic",  # noqa: F405  (see __getattr__)
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import SyncBatchNormalization and elastic at their first use: hvdlite.keras, their base, imports this module."""
    if name == "SyncBatchNormalization":
        return importlib.import_module("hvdlite.keras.sync_batch_norm").SyncBatchNormalization
    if name == "elastic":
        return importlib.import_module("hvdlite.tensorflow.elastic")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
