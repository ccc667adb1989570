"""Horovod's functions about the build, such as `nccl_built()`, and two small helpers of Horovod.

hvdlite compiles nothing. Each function tells what hvdlite uses, or can use on this host.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from hvdlite.algorithms.ring import bounds
from hvdlite.arrays import cupy, nccl_of
from hvdlite.job import runtime
from hvdlite.transports.threads import ThreadTransport

T = TypeVar("T")


def mpi_built() -> bool:
    """True: hvdlite communicates over MPI."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is in use: after init(), except in a job of one rank without a launcher."""
    if runtime.is_child():
        return True
    return runtime.is_initialized() and not isinstance(runtime.known().world, ThreadTransport)


def mpi_threads_supported() -> bool:
    """True after init(), which refuses an MPI without MPI_THREAD_MULTIPLE. Raises NotInitializedError before."""
    runtime.current()
    return True


def gloo_built() -> bool:
    """False: hvdlite does not use gloo."""
    return False


def gloo_enabled() -> bool:
    """False: hvdlite does not use gloo."""
    return False


def nccl_built() -> int:
    """NCCL's version as a number if CuPy has NCCL, else 0. HVDLITE_GPU_OPERATIONS=nccl uses NCCL."""
    if not cuda_built():
        return 0
    nccl = nccl_of(cupy())
    return int(nccl.get_version()) if nccl.available else 0


def cuda_built() -> bool:
    """Whether CuPy is installed, which tensors on GPUs need."""
    return importlib.util.find_spec("cupy") is not None


def rocm_built() -> bool:
    """False: hvdlite serves CUDA GPUs only."""
    return False


def ddl_built() -> bool:
    """False: hvdlite does not use DDL."""
    return False


def ccl_built() -> bool:
    """False: hvdlite does not use oneCCL."""
    return False


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Return whether a number of ranks suits Adasum.

    Args:
        num_rank: The number of ranks.

    Returns:
        True for 1, 2, 4, 8, ...
    """
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """Divide a sequence into contiguous parts.

    Args:
        items: The sequence.
        count: The number of parts.

    Returns:
        The parts in order. Their lengths are equal, or the first parts are longer by one.
    """
    return [items[start:stop] for start, stop in pairwise(bounds(len(items), count))]
