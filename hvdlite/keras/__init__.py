"""Horovod's names for Keras 3, on every backend: `import hvdlite.keras as hvd`.

In this room belong Keras' optimizers, callbacks, layers and models in parts, and its backends PyTorch and JAX. Not
here: TensorFlow's tensors and graphs (`tensorflow_graph/`), and the reduction of lists of gradients (`gradients/`).
"""

from hvdlite.api import names
from hvdlite.api.names import *  # noqa: F403
from hvdlite.api.output import print as print  # not in __all__
from hvdlite.checkpoints.archive import load, save
from hvdlite.keras import callbacks, elastic
from hvdlite.keras.backends import framework
from hvdlite.keras.chain import Chain
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
from hvdlite.keras.memory import memory_report
from hvdlite.keras.models import load_model
from hvdlite.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from hvdlite.keras.strategy.average import average_parameters, serve_parameters
from hvdlite.keras.sync_batch_norm import SyncBatchNormalization
from hvdlite.ops import barrier
from hvdlite.ops.objects import allgather_object, broadcast_object

Compression = framework().Compression

__all__ = [
    *names.__all__, "Chain", "Compression", "DistributedOptimizer", "PartialDistributedOptimizer",
    "SyncBatchNormalization", "allgather", "allgather_object", "allreduce", "alltoall", "barrier", "broadcast",
    "broadcast_global_variables", "broadcast_object", "broadcast_variables", "callbacks", "elastic",
    "average_parameters", "grouped_allgather", "grouped_allreduce", "grouped_reducescatter", "load", "load_model",
    "memory_report", "reducescatter", "save", "serve_parameters",
]  # fmt: skip
