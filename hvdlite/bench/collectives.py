"""The price of every collective at three sizes, beside the bare mpi4py call on the same arrays.

mpi4py gets buffers for its results. hvdlite allocates a new array unless it works in place, and each call first agrees
with all ranks that they make the same call. `barrier` is that agreement alone. The last rows show the cost of calls in
another order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite import ops
from hvdlite.bench.timing import interleaved, pin, rounds_for

SIZES = (4, 4096, 1 << 20)
CALLS = 10
ITEM = np.dtype(np.float32)
IN_FLIGHT = 8
Pair = tuple[Callable[[], Any], Callable[[], Any]]


@dataclass(frozen=True)
class Price:
    """Median seconds of one call, of hvdlite and of mpi4py. nbytes: of each rank's argument."""

    name: str
    nbytes: int
    seconds: float
    bare: float | None

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.bare if self.bare else None


@dataclass
class PriceList:
    prices: list[Price] = field(default_factory=list)
    crowded: float = 0.0


def measure(comm: MPI.Comm, seconds: float, pinned: bool, progress: Any) -> PriceList:
    """Time everything. Collective. seconds: for each pair of contenders. progress: called with (done, total, text)."""
    if pinned:
        pin(comm)
    found = PriceList()
    names = list(pairs(comm, ITEM.itemsize))
    for done, nbytes in enumerate(SIZES):
        for step, (name, (ours, bare)) in enumerate(pairs(comm, nbytes).items()):
            progress(done * len(names) + step, len(SIZES) * len(names), f"{name}, {nbytes} bytes")
            actions = {"hvdlite": ours, "mpi4py": bare}
            timing = interleaved(actions, comm, rounds_for(actions, comm, seconds, CALLS), CALLS)
            found.prices.append(Price(name, nbytes, timing.seconds["hvdlite"], timing.seconds["mpi4py"]))
            found.crowded = max(found.crowded, timing.crowded)
    actions = {"barrier": hvd.barrier, "MPI": comm.Barrier}
    timing = interleaved(actions, comm, rounds_for(actions, comm, seconds, CALLS), CALLS)
    found.prices.append(Price("barrier", 0, timing.seconds["barrier"], timing.seconds["MPI"]))
    found.prices += reordering(comm, seconds)
    return found


def pairs(comm: MPI.Comm, nbytes: int) -> dict[str, Pair]:
    """The calls of hvdlite and of mpi4py, by name. At least one element for each rank where an argument is divided."""
    rank, size = comm.Get_rank(), comm.Get_size()
    whole, out = np.zeros(max(nbytes // ITEM.itemsize, 1), ITEM), np.zeros(max(nbytes // ITEM.itemsize, 1), ITEM)
    divided = np.zeros(max(whole.size // size, 1) * size, ITEM)
    part, everyone = np.zeros(divided.size // size, ITEM), np.zeros(whole.size * size, ITEM)
    exchanged = np.zeros_like(divided)
    counts = [part.size] * size
    return {
        "allreduce_": (lambda: ops.allreduce_(whole, hvd.Sum), lambda: comm.Allreduce(MPI.IN_PLACE, whole)),
        "allgather": (lambda: ops.allgather(whole), lambda: comm.Allgather(whole, everyone)),
        "broadcast_": (lambda: ops.broadcast_(whole, 0), lambda: comm.Bcast(whole, 0)),
        "alltoall": (lambda: ops.alltoall(divided), lambda: comm.Alltoall(divided, exchanged)),
        "reducescatter": (lambda: ops.reducescatter(divided, hvd.Sum),
                          lambda: comm.Reduce_scatter(divided, part, counts)),
        "reduce": (lambda: hvd.reduce(whole, 0, hvd.Sum), lambda: comm.Reduce(whole, out, MPI.SUM, 0)),
        "gather": (lambda: ops.gather(whole, 0), lambda: comm.Gather(whole, everyone, 0)),
        "scatter": (lambda: ops.scatter(divided, 0), lambda: comm.Scatter(divided, part, 0)),
        "send / recv": (lambda: message(rank, whole), lambda: bare_message(comm, rank, out)),
    }  # fmt: skip


def message(rank: int, array: Any) -> None:
    """From rank 0 to rank 1; the others rest."""
    if rank == 0:
        hvd.send(array, 1)
    elif rank == 1:
        hvd.recv(0)


def bare_message(comm: MPI.Comm, rank: int, array: Any) -> None:
    if rank == 0:
        comm.Send(array, 1)
    elif rank == 1:
        comm.Recv(array, 0)


def reordering(comm: MPI.Comm, seconds: float) -> list[Price]:
    """Eight named all-reduces in flight, submitted alike on all ranks or by each in an order of its own."""
    alike, own = list(range(IN_FLIGHT)), random.Random(comm.Get_rank())
    arrays = [np.zeros(1, ITEM) for _ in alike]

    def submit(order: Sequence[int]) -> None:
        for handle in [ops.allreduce_.start(arrays[i], hvd.Sum, f"item {i}") for i in order]:
            handle.wait()

    def shuffled() -> None:
        submit(own.sample(alike, IN_FLIGHT))

    actions = {"ordered": lambda: submit(alike), "shuffled": shuffled}
    found = interleaved(actions, comm, rounds_for(actions, comm, seconds, CALLS), CALLS).seconds
    return [Price(f"{IN_FLIGHT} {name}", 4, found[name], None) for name in actions]
