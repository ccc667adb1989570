"""Horovod's names for PyTorch: `import hvdlite.torch as hvd`."""

from hvdlite.torch.shares import shard as shard  # isort: skip  (the same function; mypy keeps its first type)
from hvdlite.api.names import *  # type: ignore[assignment]  # noqa: F403  (mpi_ops has them; mypy sees them here)
from hvdlite.api.output import print as print  # not in __all__
from hvdlite.errors import HorovodInternalError
from hvdlite.job.runtime import is_child, is_initialized, local_rank, when_started
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.torch import elastic, mpi_ops
from hvdlite.torch.attach.part import clip_grad_norm_
from hvdlite.torch.averaging import average_parameters, serve_parameters
from hvdlite.torch.checkpoints import load, save
from hvdlite.torch.compression import Compression
from hvdlite.torch.cuda import choose_gpu
from hvdlite.torch.functions import broadcast_optimizer_state, broadcast_parameters, broadcast_variables
from hvdlite.torch.joining import uneven_inputs
from hvdlite.torch.memory import memory_report
from hvdlite.torch.mpi_ops import *  # noqa: F403
from hvdlite.torch.optimizer import DistributedOptimizer
from hvdlite.torch.sharded.zero import ZeroRedundancyOptimizer
from hvdlite.torch.step_count import count_steps
from hvdlite.torch.sync_batch_norm import SyncBatchNorm

count_steps()
when_started.append(choose_gpu)
if is_initialized() and not is_child():  # a child of a rank leaves GPUs alone
    choose_gpu(local_rank())

__all__ = [
    *mpi_ops.__all__, "Compression", "DistributedOptimizer", "HorovodInternalError", "SyncBatchNorm",
    "ZeroRedundancyOptimizer", "allgather_object", "average_parameters", "broadcast_object",
    "broadcast_optimizer_state", "broadcast_parameters", "broadcast_variables", "clip_grad_norm_", "elastic", "load",
    "memory_report", "save", "serve_parameters", "uneven_inputs",
]  # fmt: skip
