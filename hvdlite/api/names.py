"""The names that `hvdlite` and all of its adapters have in common: jobs, ranks, process sets, reductions, helpers.

`hvd.print` is imported by each of them from `api.output`: a star-import must not hide Python's print.
"""

from hvdlite.api.build import (
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
from hvdlite.api.communication import CommunicationStats, communication_stats
from hvdlite.api.metrics import Metric, average_metrics
from hvdlite.api.neighbors import in_neighbor_ranks, load_topology, out_neighbor_ranks, set_topology
from hvdlite.api.output import rank_zero_only
from hvdlite.api.process_sets import add_process_set, remove_process_set
from hvdlite.api.seeds import seed
from hvdlite.api.shares import shard
from hvdlite.api.summary import Summary, count_step, metrics, summary
from hvdlite.api.timeline import start_timeline, stop_timeline
from hvdlite.api.training_log import logger
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.job.runtime import (
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
from hvdlite.ops import Adasum, Average, Max, Min, Product, Sum
from hvdlite.strategies.diloco import DiLoCo
from hvdlite.strategies.local_sgd import LocalSGD
from hvdlite.strategies.neighbors import Neighbors
from hvdlite.strategies.outer import OuterSGD
from hvdlite.strategies.staleness import BoundedStaleness, staleness
from hvdlite.strategies.topology import (
    ExponentialGraph,
    ExponentialTwoGraph,
    FullyConnectedGraph,
    GetDynamicOnePeerSendRecvRanks,
    MeshGrid2DGraph,
    OnePeerExponential,
    RingGraph,
    StarGraph,
    Topology,
)
from hvdlite.strategies.work_queue import WorkQueue

__all__ = [
    "Adasum", "Average", "BoundedStaleness", "CommunicationStats", "DiLoCo", "ExponentialGraph", "ExponentialTwoGraph",
    "FullyConnectedGraph", "GetDynamicOnePeerSendRecvRanks", "LocalSGD", "Max", "MeshGrid2DGraph", "Metric", "Min",
    "Neighbors", "OnePeerExponential", "OuterSGD", "ProcessSet", "Product", "RingGraph", "StarGraph", "Sum", "Summary",
    "Topology", "WorkQueue", "add_process_set", "average_metrics", "ccl_built", "communication_stats", "count_step",
    "cross_rank", "cross_size", "cuda_built", "ddl_built", "global_process_set", "gloo_built", "gloo_enabled",
    "in_neighbor_ranks", "init", "is_homogeneous", "is_initialized", "load_topology", "local_rank", "local_size",
    "logger", "metrics", "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "out_neighbor_ranks",
    "rank", "rank_zero_only", "remove_process_set", "rocm_built", "seed", "set_topology", "shard", "shutdown", "size",
    "staleness", "start_timeline", "stop_timeline", "summary",
]  # fmt: skip
