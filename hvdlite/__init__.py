"""hvdlite: data-parallel training over MPI, with Horovod's names, for any framework.

    import hvdlite as hvd
    hvd.init()
    optimizer = hvd.DistributedOptimizer(optimizer)
    hvd.broadcast_variables(model, root_rank=0)

The functions here serve every framework: which one is found from the object they are given, and only then imported.
`hvdlite.torch` has Horovod's full set of names for PyTorch. Importing hvdlite imports no framework and no MPI.
"""

from __future__ import annotations

from typing import Any, TypeVar

from hvdlite import elastic, frameworks
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
from hvdlite.errors import (
    HorovodInternalError,
    HvdliteError,
    MismatchError,
    NotInitializedError,
    ShutdownError,
    StallError,
)
from hvdlite.front import *  # noqa: F403
from hvdlite.front import __all__ as _collectives
from hvdlite.joining import join
from hvdlite.launch import run
from hvdlite.membership import add_process_set, remove_process_set
from hvdlite.objects import allgather_object, broadcast_object
from hvdlite.ops import Adasum, Average, Max, Min, Op, Product, Sum, barrier
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
    when_started,
)
from hvdlite.tracing import start_timeline, stop_timeline

when_started.append(frameworks.prepare_torch)

__version__ = "0.1.0"
T = TypeVar("T")


def DistributedOptimizer(optimizer: T, *args: Any, **kwargs: Any) -> T:
    """Make the optimizer's gradients those of all ranks; returns the same object. The arguments are the framework's:
    see `hvdlite.torch.DistributedOptimizer`. Collective."""
    return frameworks.adapter(optimizer).DistributedOptimizer(optimizer, *args, **kwargs)  # type: ignore[no-any-return]


def broadcast_variables(variables: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite the weights of a model, an optimizer's state, or variables in a dict or sequence with root_rank's.
    Waits for all ranks of the process set. Raises MismatchError with a diff, on every rank, where lists differ."""
    variables = frameworks.materialized(variables)
    frameworks.adapter(variables).broadcast_variables(variables, root_rank, process_set=process_set)


__all__ = [
    *_collectives, "Adasum", "Average", "DistributedOptimizer", "HorovodInternalError", "HvdliteError", "Max", "Min",
    "MismatchError", "NotInitializedError", "Op", "ProcessSet", "Product", "ShutdownError", "StallError", "Sum",
    "add_process_set", "allgather_object", "barrier", "broadcast_object", "broadcast_variables", "ccl_built",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "elastic", "global_process_set", "gloo_built",
    "gloo_enabled", "init", "is_homogeneous", "is_initialized", "join", "local_rank", "local_size", "mpi_built",
    "mpi_enabled", "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built", "run",
    "shutdown", "size", "start_timeline", "stop_timeline",
]  # fmt: skip
