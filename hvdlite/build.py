"""What Horovod scripts ask about the build. Here nothing is built: the answers say what this package can use."""

from __future__ import annotations

from hvdlite import runtime


def mpi_built() -> bool:
    """MPI is what hvdlite communicates with."""
    return True


def mpi_enabled() -> bool:
    """Whether MPI is in use: after init(), in a job that a launcher started."""
    return runtime.is_initialized() and runtime.uses_mpi()


def mpi_threads_supported() -> bool:
    """True after init(), which refuses an MPI without MPI_THREAD_MULTIPLE. Raises ValueError before."""
    runtime.current()
    return True


def gloo_built() -> bool:
    return False


def gloo_enabled() -> bool:
    return False


def nccl_built() -> int:
    """0: collectives on GPUs do not go through NCCL."""
    return 0


def cuda_built() -> bool:
    return False


def rocm_built() -> bool:
    return False


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False
