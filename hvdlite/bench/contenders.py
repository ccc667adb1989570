"""The contenders of the all-reduce benchmark: hvdlite's algorithms and others.

A contender is a function of an element count. It returns the array and the call that reduces it in place. hvdlite's
contenders go through a lane with its roll call, as users' calls do. On several hosts the two-shot is the inner part of
the hierarchical algorithm, and a plain TCP stream shows what the link can do.
"""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite import ops
from hvdlite.algorithms import prepared
from hvdlite.algorithms.reduction import Reduction
from hvdlite.bench.network import Link, least_bytes
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.job import runtime
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.memory import workspace
from hvdlite.memory.huge_pages import HUGE_PAGE, libc, reserved

TITLES = {
    "arena": "arena",
    "tensor": "shared\n(tensor)",
    "ring": "ring",
    "halving_doubling": "halving-\ndoubling",
    "auto": "allreduce_\n(auto)",
    "mpi": "MPI_\nAllreduce",
    "mpi_huge": "MPI, in\nhuge pages",
    "gloo": "gloo",
    "memcpy": "memcpy",
    "link": "link",
    "ipc": "two-shot\n(IPC)",
    "ring_whole": "ring\n(whole)",
    "staged": "ring\n(staged)",
    "mpi_host": "MPI_\nAllreduce\n(host)",
    "copy": "copy\n(floor)",
}
KEYS = ("arena", "tensor", "ring", "halving_doubling", "auto", "mpi", "mpi_huge", "gloo", "memcpy", "link")
"""Those in host memory."""
ON_ONE_HOST, ON_SEVERAL = ("tensor", "mpi_huge", "memcpy"), ("link",)
ITEM = np.dtype(np.float32)


@dataclass(frozen=True)
class Trial:
    """array: what is reduced, in place (None: nothing is, as in memcpy). call: reduces it once."""

    array: Any
    call: Callable[[], Any]


@dataclass(frozen=True)
class Contender:
    key: str
    prepare: Callable[[int], Trial]
    """From the number of float32 elements to the trial."""
    most_bytes: int | None = None
    """It does not take part above this size."""

    @property
    def title(self) -> str:
        return TITLES[self.key]


def contenders(keys: list[str], most_bytes: int, comm: MPI.Comm) -> list[Contender]:
    """The contenders named, for arrays up to most_bytes. Collective. gloo is left out where torch is missing."""
    buffer, other = ordinary(most_bytes), ordinary(most_bytes)
    everyone = runtime.current().everyone
    lane = everyone.new_lane("bench", everyone)
    made: dict[str, Callable[[], Callable[[int], Trial]]] = {
        "arena": lambda: gradients(everyone.new_lane("bench gradients", everyone)),
        "tensor": lambda: forced(lane, buffer, "shared"),
        "ring": lambda: forced(lane, buffer, "ring"),
        "halving_doubling": lambda: forced(lane, buffer, "halving_doubling"),
        "auto": lambda: as_users_call(buffer),
        "mpi": lambda: native(comm, buffer),
        "mpi_huge": lambda: native(comm, ordinary(most_bytes, huge_pages=True)),
        "gloo": lambda: gloo(buffer),
        "memcpy": lambda: copying(buffer, other),
        "link": lambda: streaming(Link(comm)),
    }
    elsewhere = ON_SEVERAL if runtime.current().topology.one_host else ON_ONE_HOST
    able = [key for key in keys if key not in elsewhere and (key != "gloo" or importlib.util.find_spec("torch"))]
    return [Contender(key, made[key](), workspace.MOST_STAGED_BYTES if key == "tensor" else None) for key in able]


def ordinary(nbytes: int, huge_pages: bool = False) -> Any:
    """Zeros as torch and TensorFlow allocate tensors, in the pages that the kernel gives unasked. NumPy asks for huge
    ones from 4 MiB on, where the kernel has them: there an MPI, whose ranks copy out of each other's memory page by
    page, takes 0.6 of the time (1 MiB in 67 us instead of 109)."""
    memory = reserved(-(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    if huge_pages:
        libc.madvise(memory.ctypes.data, memory.size, mmap.MADV_HUGEPAGE)
    memory[:] = 0  # now the pages are there
    return memory.view(ITEM)[: nbytes // ITEM.itemsize]


def gradients(lane: Lane) -> Callable[[int], Trial]:
    """The gradients' path: one gradient, in memory that the peers can reach, and a `Reducer`. Collective each time."""

    def prepare(count: int) -> Trial:
        layout, _ = planned([Spec("gradient", (count,), ITEM.name)], runtime.current().config, lane.place)
        reducer = Reducer(lane, layout, Reduction("sum"), "bench", Departure(False))
        rounds = in_turn()

        def call() -> None:
            tag = next(rounds)
            reducer.mark_at_end((0,), {})
            reducer.finish_round(lambda _: Use.DENSE, tag)

        return Trial(reducer.views[0], call)

    return prepare


def forced(lane: Lane, buffer: Any, algorithm: str) -> Callable[[int], Trial]:
    """One algorithm on an ordinary array, decided and asked for once, as for a bucket of gradients."""
    place = replace(lane.place, forced=algorithm)

    def prepare(count: int) -> Trial:
        array, rounds = buffer[:count], in_turn()
        run = prepared(lane.transport, lane.host.workspace, place, array, Reduction("sum"))
        request = Request(Signature("bench", algorithm, round=next(rounds)), lambda lane: run())
        lane.run(request)

        def call() -> None:
            lane.run(request.again(next(rounds)))

        return Trial(array, call)

    return prepare


def in_turn() -> Iterator[Round]:
    """The names of rounds, as of steps with one backward each."""
    return (Round("step {}, backward {}, attempt {}", (step, 1, 1)) for step in count(1))


def as_users_call(buffer: Any) -> Callable[[int], Trial]:
    """The public in-place all-reduce, which chooses by itself."""

    def prepare(count: int) -> Trial:
        array = buffer[:count]
        return Trial(array, lambda: ops.allreduce_(array, ops.Sum))

    return prepare


def native(comm: MPI.Comm, buffer: Any) -> Callable[[int], Trial]:
    """The MPI library's own, in place."""

    def prepare(count: int) -> Trial:
        array = buffer[:count]
        return Trial(array, lambda: comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM))

    return prepare


def gloo(buffer: Any) -> Callable[[int], Trial]:
    """torch.distributed's all_reduce on CPU tensors. Collective."""
    import torch

    distributed = start_gloo()

    def prepare(count: int) -> Trial:
        tensor = torch.from_numpy(buffer[:count])
        return Trial(buffer[:count], lambda: distributed.all_reduce(tensor))

    return prepare


def start_gloo() -> Any:
    """torch.distributed, initialized with gloo over a store that rank 0 opens. Collective; once per process."""
    import torch.distributed

    distributed: Any = torch.distributed  # its own types leave TCPStore out
    if distributed.is_initialized():
        return distributed
    host = "127.0.0.1" if runtime.current().topology.one_host else MPI.Get_processor_name()
    store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    host, port = hvd.broadcast_object((host, store.port if store else 0))
    store = store or distributed.TCPStore(host, port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    return distributed


def copying(buffer: Any, other: Any) -> Callable[[int], Trial]:
    """A copy of the same bytes from one warm buffer to another, on all ranks at once: what memory could do."""

    def prepare(count: int) -> Trial:
        source, target = buffer[:count], other[:count]
        return Trial(None, lambda: np.copyto(target, source))

    return prepare


def streaming(link: Link) -> Callable[[int], Trial]:
    """The least bytes that an all-reduce can send, from each host to the next, as plain TCP streams."""
    return lambda count: Trial(None, lambda: link.stream(least_bytes(count * ITEM.itemsize, link.hosts)))
