"""The contenders of the all-reduce benchmark: hvdlite's algorithms and others.

A contender makes a trial for a number of elements: an array, and a call that reduces the array in place. hvdlite's
contenders go through a lane with its roll call, like users' calls. On several hosts the two-shot is the inner part of
the hierarchical algorithm, and a plain TCP stream shows the speed of the link. One exchange among neighbours on a ring
is no all-reduce: it is the communication of one step of D-PSGD.
"""

from __future__ import annotations

import importlib.util
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite import ops
from hvdlite.algorithms import prepared
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array
from hvdlite.bench.network import Link, least_bytes
from hvdlite.bench.timing import Action
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.plan import Spec
from hvdlite.gradients.policy import planned
from hvdlite.gradients.reducer import Reducer
from hvdlite.gradients.use import Use
from hvdlite.job import runtime
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Round, Signature
from hvdlite.memory.huge_pages import HUGE_PAGE, libc, reserved

if TYPE_CHECKING:
    import torch

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
    "neighbors": "neighbor_\nallreduce\n(ring)",
    "ipc": "two-shot\n(IPC)",
    "ring_whole": "ring\n(whole)",
    "staged": "ring\n(staged)",
    "mpi_host": "MPI_\nAllreduce\n(host)",
    "copy": "copy\n(floor)",
}
KEYS = ("arena", "tensor", "ring", "halving_doubling", "auto", "mpi", "mpi_huge", "gloo", "memcpy", "link", "neighbors")
"""The contenders in host memory."""
ON_ONE_HOST, ON_SEVERAL = ("tensor", "mpi_huge", "memcpy"), ("link", "neighbors")
ITEM = np.dtype(np.float32)


@dataclass(frozen=True)
class Trial:
    """One contender at one size.

    Attributes:
        array: The array that is reduced in place; None: there is none, as in memcpy.
        call: Reduces the array once.
    """

    array: Array | None
    call: Action


Prepare: TypeAlias = Callable[[int], Trial]
"""Makes the trial for a number of float32 elements."""


@dataclass(frozen=True)
class Contender:
    """One contender.

    Attributes:
        key: Its name on the command line.
        prepare: Makes its trials. Collective for some contenders.
    """

    key: str
    prepare: Prepare

    @property
    def title(self) -> str:
        return TITLES[self.key]


def contenders(keys: list[str], most_bytes: int, comm: MPI.Comm) -> list[Contender]:
    """Make the named contenders, for arrays on the host. Collective.

    Args:
        keys: The contenders' names, of KEYS.
        most_bytes: The largest size.
        comm: All ranks.

    Returns:
        The contenders that can run here: gloo needs torch, some need one host, and some need several.
    """
    buffer, other = ordinary(most_bytes), ordinary(most_bytes)
    everyone = runtime.current().everyone
    lane = everyone.new_lane("bench", everyone)
    made: dict[str, Callable[[], Prepare]] = {
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
        "neighbors": lambda: on_a_ring(buffer),
    }
    elsewhere = ON_SEVERAL if runtime.current().topology.one_host else ON_ONE_HOST
    able = [key for key in keys if key not in elsewhere and (key != "gloo" or importlib.util.find_spec("torch"))]
    return [Contender(key, made[key]()) for key in able]


def ordinary(nbytes: int, huge_pages: bool = False) -> Array:
    """Allocate zeros in ordinary pages, like tensors of torch and TensorFlow.

    NumPy asks for huge pages from 4 MiB on. An MPI copies other ranks' memory page by page, and takes 0.6 of the time
    in huge pages (MEASURED.md).
    """
    memory = reserved(-(-nbytes // HUGE_PAGE) * HUGE_PAGE)
    if huge_pages:
        libc.madvise(memory.ctypes.data, memory.size, mmap.MADV_HUGEPAGE)
    memory[:] = 0  # now the pages are there
    return cast(Array, memory.view(ITEM)[: nbytes // ITEM.itemsize])


def gradients(lane: Lane) -> Prepare:
    """The way of gradients: one gradient in an arena, reduced by a `Reducer`. Making a trial is collective."""

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


def forced(lane: Lane, buffer: Array, algorithm: str) -> Prepare:
    """One algorithm on an ordinary array, prepared once, as for a bucket of gradients."""
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
    """Names of rounds, like those of steps with one backward each."""
    return (Round("step {}, backward {}, attempt {}", (step, 1, 1)) for step in count(1))


def as_users_call(buffer: Array) -> Prepare:
    """The public in-place all-reduce, which chooses the algorithm."""

    def prepare(count: int) -> Trial:
        array = buffer[:count]
        return Trial(array, lambda: ops.allreduce_(array, ops.Sum))

    return prepare


def native(comm: MPI.Comm, buffer: Array) -> Prepare:
    """MPI_Allreduce, in place."""

    def prepare(count: int) -> Trial:
        array = buffer[:count]
        return Trial(array, lambda: comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM))

    return prepare


def gloo(buffer: Array) -> Prepare:
    """torch.distributed's all_reduce on CPU tensors. Collective."""
    import torch

    distributed = start_gloo()

    def prepare(count: int) -> Trial:
        tensor = torch.from_numpy(buffer[:count])
        return Trial(buffer[:count], lambda: distributed.all_reduce(tensor))

    return prepare


class Store(Protocol):
    """torch.distributed.TCPStore, which torch's own types leave out."""

    port: int


class Distributed(Protocol):
    """torch.distributed, as the benchmarks use it."""

    def is_initialized(self) -> bool: ...
    def TCPStore(self, host: str, port: int, **options: bool) -> Store: ...
    def init_process_group(self, backend: str, *, store: Store | None, rank: int, world_size: int) -> None: ...
    def all_reduce(self, tensor: torch.Tensor) -> object: ...


def start_gloo() -> Distributed:
    """Initialize torch.distributed with gloo, over a store on rank 0. Collective; does nothing the second time.

    Returns:
        torch.distributed.
    """
    import torch.distributed

    distributed = cast(Distributed, torch.distributed)
    if distributed.is_initialized():
        return distributed
    host = "127.0.0.1" if runtime.current().topology.one_host else MPI.Get_processor_name()
    store = distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    host, port = hvd.broadcast_object((host, store.port if store else 0))
    store = store or distributed.TCPStore(host, port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    return distributed


def copying(buffer: Array, other: Array) -> Prepare:
    """A copy of the same bytes between two warm buffers, on all ranks at once: the limit of memory."""

    def prepare(count: int) -> Trial:
        source, target = buffer[:count], other[:count]
        return Trial(None, lambda: np.copyto(target, source))

    return prepare


def streaming(link: Link) -> Prepare:
    """Plain TCP streams from each host to the next, of the least bytes that an all-reduce can send."""
    return lambda count: Trial(None, lambda: link.stream(least_bytes(count * ITEM.itemsize, link.hosts)))


def on_a_ring(buffer: Array) -> Prepare:
    """An average of each rank's array and those of its two neighbours. Collective."""
    hvd.set_topology(hvd.RingGraph(hvd.size()), is_weighted=True)

    def prepare(count: int) -> Trial:
        array = buffer[:count]
        return Trial(None, lambda: hvd.neighbor_allreduce(array))

    return prepare
