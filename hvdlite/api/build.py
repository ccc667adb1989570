"""What Horovod scripts ask about the build. Here nothing is built: the answers say what this package can use."""

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
    """MPI is what hvdlite communicates with."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is in use: after init(), and not in a job of one without a launcher."""
    if runtime.is_child():
        return True
    return runtime.is_initialized() and not isinstance(runtime.known().world, ThreadTransport)


def mpi_threads_supported() -> bool:
    """True after init(), which refuses an MPI without MPI_THREAD_MULTIPLE. Raises ValueError before."""
    runtime.current()
    return True


def gloo_built() -> bool:
    """No: there is no gloo in here."""
    return False


def gloo_enabled() -> bool:
    """No: there is no gloo in here."""
    return False


def nccl_built() -> int:
    """NCCL's version as a number, where CuPy has it; 0 elsewhere. HVDLITE_GPU_OPERATIONS=nccl uses it."""
    if not cuda_built():
        return 0
    nccl = nccl_of(cupy())
    return int(nccl.get_version()) if nccl.available else 0


def cuda_built() -> bool:
    """Whether CuPy is there, without which tensors on GPUs cannot be communicated."""
    return importlib.util.find_spec("cupy") is not None


def rocm_built() -> bool:
    """No: GPUs are CUDA's."""
    return False


def ddl_built() -> bool:
    """No: there is no DDL in here."""
    return False


def ccl_built() -> bool:
    """No: there is no oneCCL in here."""
    return False


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Whether it is 1, 2, 4, 8, ... (what Adasum asks of the number of ranks)."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0


def split_list(items: Sequence[T], count: int) -> list[Sequence[T]]:
    """`count` contiguous parts of nearly equal length, the first ones longer by one."""
    return [items[start:stop] for start, stop in pairwise(bounds(len(items), count))]
