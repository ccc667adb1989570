"""Questions about the build under the name of Horovod's module."""

from hvdlite.build import ccl_built, ddl_built, gloo_built, mpi_built, nccl_built, split_list

__all__ = ["ccl_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built", "split_list"]
