"""The backend as torch sees it: how a process group is made, how ranks meet, and which variables they find."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hvdlite_torch_plugin.places import place_in, variables

if TYPE_CHECKING:
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import Store

MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""The variables by which env:// finds rank 0. If they are set, env:// keeps its meaning."""


def register_all() -> None:
    """Register the backend, the rendezvous mpi://, and env:// without a MASTER_ADDR under an MPI launcher.

    Under an MPI launcher also set the variables of torchrun, since scripts read them.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

    dist.Backend.register_backend("hvdlite", create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler("mpi", meet)  # type: ignore[no-untyped-call]
    by_environment = _rendezvous_handlers["env"]

    def meet_by_environment(url: str, *args: Any, **kwargs: Any) -> Iterator[tuple[Store, int, int]]:
        launched = not all(os.environ.get(name) for name in MEETING) and place_in(os.environ) is not None
        return (meet if launched else by_environment)(url, *args, **kwargs)

    _rendezvous_handlers["env"] = meet_by_environment
    announce()
    if place_in(os.environ) is not None:
        atexit.register(end_if_failed)
    if os.environ.get("HVDLITE_AS_MPI", "0") not in ("", "0"):
        stand_for_mpi()


def announce() -> None:
    """Set those of torchrun's variables that are unset, for this rank of an MPI job.

    If RANK or WORLD_SIZE is set, somebody has numbered the processes already, and none is set.
    """
    found = place_in(os.environ)
    if found and "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        for name, number in variables(found).items():
            os.environ.setdefault(name, number)


def end_if_failed() -> None:
    """At the process' exit: end the job if an exception ends this rank, and a library has initialized MPI.

    Lightning does so, long before a process group is made. MPI's end would wait for the other ranks.
    """
    if getattr(sys, "last_value", None) is not None and "mpi4py.MPI" in sys.modules:
        from hvdlite.job.exits import end_for_uncaught

        end_for_uncaught()


def stand_for_mpi() -> None:
    """Let "mpi" mean "hvdlite", for libraries that choose "mpi" by themselves where torch has it (accelerate on CPUs).

    Changes two things of torch: torch.distributed.is_mpi_available() returns True, and torch.distributed.Backend("mpi")
    is "hvdlite", in init_process_group and new_group, too.
    """
    from torch.distributed import distributed_c10d

    make = distributed_c10d.Backend.__new__

    def new(cls: type[str], name: str) -> str:
        return make(cls, "hvdlite" if isinstance(name, str) and name.lower() == "mpi" else name)  # type: ignore

    distributed_c10d.Backend.__new__ = staticmethod(new)  # type: ignore
    distributed_c10d._MPI_AVAILABLE = True


def create(options: Any, backend_options: object = None) -> dist.ProcessGroup:
    """Make a process group. Collective over its ranks. torch calls this for init_process_group and new_group."""
    from hvdlite.torch.distributed.creation import create

    return create(options)


def meet(url: str, timeout: timedelta, **kwargs: object) -> Iterator[tuple[Store, int, int]]:
    """The rendezvous mpi://: the ranks of the MPI job meet over MPI. Collective."""
    from hvdlite.torch.distributed.rendezvous import meet

    yield meet(url, timeout)
    raise RuntimeError("mpi:// cannot meet again: call destroy_process_group and init_process_group")
