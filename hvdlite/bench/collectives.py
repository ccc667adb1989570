"""The time of every collective at three sizes, beside the bare mpi4py call on the same arrays.

mpi4py gets buffers for its results. hvdlite allocates a new array unless it works in place. Before each call all ranks
agree that they make the same call; `barrier` is that agreement alone. In the last rows, ranks make calls in different
orders.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from mpi4py import MPI

import hvdlite as hvd
from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.bench.timing import Action, Progress, Quartiles, interleaved, pin, rounds_for

SIZES = (4, 4096, 1 << 20)
CALLS = 10
ITEM = np.dtype(np.float32)
IN_FLIGHT = 8
Pair: TypeAlias = tuple[Action, Action]
"""One collective: hvdlite's call and mpi4py's."""


@dataclass(frozen=True)
class Price:
    """The time of one call.

    Attributes:
        name: The call.
        nbytes: The size of each rank's argument.
        seconds: Median seconds of hvdlite's call.
        bare: Median seconds of mpi4py's call; None: there is none.
        spread: The quartiles of the seconds of "hvdlite" and "mpi4py".
    """

    name: str
    nbytes: int
    seconds: float
    bare: float | None
    spread: dict[str, Quartiles] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        return self.seconds / self.bare if self.bare else None


@dataclass(frozen=True)
class PriceList:
    """The times of all calls. crowded: the largest of all timings, as in `timing.Timing`."""

    prices: list[Price]
    crowded: float


def measure(comm: MPI.Comm, seconds: float, pinned: bool, progress: Progress) -> PriceList:
    """Time all collectives. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        seconds: The time for each call and size.
        pinned: Whether no two ranks share a core.
        progress: Called before each call.

    Returns:
        The times, equal on all ranks.
    """
    if pinned:
        pin(comm)
    prices, crowded = [], 0.0
    calls = [(name, nbytes, pair) for nbytes in SIZES for name, pair in pairs(comm, nbytes).items()]
    calls.append(("barrier", 0, (hvd.barrier, comm.Barrier)))
    for done, (name, nbytes, (ours, bare)) in enumerate(calls):
        progress(done, len(calls) + 1, f"{name}, {nbytes} bytes")
        actions = {"hvdlite": ours, "mpi4py": bare}
        timing = interleaved(actions, comm, rounds_for(actions, comm, seconds, CALLS), CALLS)
        prices.append(Price(name, nbytes, timing.seconds["hvdlite"], timing.seconds["mpi4py"], timing.spread))
        crowded = max(crowded, timing.crowded)
    progress(len(calls), len(calls) + 1, f"{IN_FLIGHT} calls in flight")
    return PriceList([*prices, *reordering(comm, seconds)], crowded)


def pairs(comm: MPI.Comm, nbytes: int) -> dict[str, Pair]:
    """The calls of hvdlite and of mpi4py, by name. A divided argument has at least one element for each rank."""
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


def message(rank: int, array: Array) -> None:
    """Send from rank 0 to rank 1; other ranks do nothing."""
    if rank == 0:
        hvd.send(array, 1)
    elif rank == 1:
        hvd.recv(0)


def bare_message(comm: MPI.Comm, rank: int, array: Array) -> None:
    """The same with mpi4py."""
    if rank == 0:
        comm.Send(array, 1)
    elif rank == 1:
        comm.Recv(array, 0)


def reordering(comm: MPI.Comm, seconds: float) -> list[Price]:
    """Time eight named all-reduces in flight: in one order on all ranks, and in a different order on each rank."""
    items, own = list(range(IN_FLIGHT)), random.Random(comm.Get_rank())
    arrays = [np.zeros(1, ITEM) for _ in items]

    def submit(order: Sequence[int]) -> None:
        for handle in [ops.allreduce_.start(arrays[i], hvd.Sum, f"item {i}") for i in order]:
            handle.wait()

    def shuffled() -> None:
        submit(own.sample(items, IN_FLIGHT))

    actions: dict[str, Action] = {"ordered": lambda: submit(items), "shuffled": shuffled}
    found = interleaved(actions, comm, rounds_for(actions, comm, seconds, CALLS), CALLS)
    return [
        Price(f"{IN_FLIGHT} {name}", 4, found.seconds[name], None, {"hvdlite": found.spread[name]}) for name in actions
    ]
