"""The contenders on GPUs, for `allreduce --device cuda`. Each call ends when the GPU has the result.

The floor is a copy of the same bytes on every rank's GPU at once. The two-shot, like a copy, reads and writes each byte
once per rank. If all ranks share one GPU, the floor does not show the speed of links between GPUs.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from mpi4py import MPI

from hvdlite import ops
from hvdlite.algorithms import allreduce, pipeline, prepared, prepared_in_arena
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, cupy
from hvdlite.bench.contenders import ITEM, Contender, Prepare, Trial, start_gloo
from hvdlite.bench.contenders import native as native_on_host
from hvdlite.bench.timing import Action
from hvdlite.gpu_streams import finish
from hvdlite.job import runtime
from hvdlite.lanes.gpu_side import gpu_of, on_gpu, side_of
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory.arena import Arena
from hvdlite.transports.device import StagedTransport

KEYS = ("ipc", "ring", "ring_whole", "halving_doubling", "staged", "auto", "mpi", "mpi_host", "gloo", "copy")
NEED_POINTERS = ("ring", "ring_whole", "halving_doubling", "mpi")


def contenders(keys: list[str], most_bytes: int, comm: MPI.Comm) -> list[Contender]:
    """Make the named contenders, for arrays on GPUs. Collective.

    Args:
        keys: The contenders' names, of KEYS.
        most_bytes: The largest size.
        comm: All ranks.

    Returns:
        The contenders that can run here: some need an MPI that takes device pointers, the two-shot needs CUDA IPC, and
        gloo needs torch.
    """
    xp = cupy()
    xp.cuda.Device(runtime.local_rank() % xp.cuda.runtime.getDeviceCount()).use()
    buffer = xp.zeros(most_bytes // ITEM.itemsize, ITEM)
    live = runtime.current()
    everyone = live.everyone
    with live.configured(replace(live.config, cuda_aware=False)):
        staged = live.groups.mine[live.groups.open(everyone.ranks, live.world)]
    lane, by_host = everyone.new_lane("bench", everyone), staged.new_lane("bench staged", staged)
    direct = lane.run(Request(Signature("bench", "messages"), lambda at: takes_pointers(at, buffer)))
    arena = arena_of(lane, buffer, most_bytes) if "ipc" in keys else None
    made: dict[str, Callable[[], Prepare]] = {
        "ring": lambda: forced(lane, buffer, "ring"),
        "ring_whole": lambda: unchunked(forced(lane, buffer, "ring")),
        "halving_doubling": lambda: forced(lane, buffer, "halving_doubling"),
        "staged": lambda: forced(by_host, buffer, "ring"),
        "auto": lambda: lambda count: finished(buffer[:count], lambda: ops.allreduce_(buffer[:count], ops.Sum)),
        "mpi": lambda: native(comm, buffer),
        "mpi_host": lambda: native_on_host(comm, np.zeros(most_bytes // ITEM.itemsize, ITEM)),
        "gloo": lambda: gloo(buffer),
        "copy": lambda: copying(buffer, xp.zeros_like(buffer)),
    }
    if arena and arena.peers:
        made["ipc"] = lambda: in_arena(lane, arena)
    left_out = [*(() if direct else NEED_POINTERS), *(() if importlib.util.find_spec("torch") else ("gloo",))]
    return [Contender(key, made[key]()) for key in keys if key in made and key not in left_out]


def takes_pointers(at: Workplace, buffer: Array) -> bool:
    """Whether the MPI takes device pointers. Collective."""
    return not isinstance(side_of(at.host, gpu_of(buffer)).transport, StagedTransport)


def finished(array: Array | None, call: Action) -> Trial:
    """A trial that waits for the GPU after the call."""
    stream = cupy().cuda.get_current_stream()

    def whole() -> None:
        call()
        stream.synchronize()

    return Trial(array, whole)


def on_lane(lane: Lane, array: Array, name: str, work: Callable[[Workplace], object]) -> Trial:
    """A trial that runs the work as a request, after all work that the caller has issued, like users' calls."""

    def call() -> None:
        request = Request(Signature("bench", name), work)
        on_gpu(lane, request, array)
        lane.run(request)

    return finished(array, call)


def arena_of(lane: Lane, buffer: Array, most_bytes: int) -> Arena:
    """Allocate an arena, as a `Reducer` does. Its peers are None if their GPUs cannot reach it. Collective."""

    def make(at: Workplace) -> Arena:
        with side_of(at.host, gpu_of(buffer)).working() as side:
            place = side.place
            return side.workspace.allocate("bench", side.transport, most_bytes, place.shares_memory, place.hosts)

    arena: Arena = lane.run(Request(Signature("bench", "arena"), make))
    return arena


def in_arena(lane: Lane, arena: Arena) -> Prepare:
    """The way of gradients: a buffer that other ranks' GPUs can reach, prepared once, as a `Reducer` does."""

    def prepare(count: int) -> Trial:
        mine, peers = arena.view(0, count, ITEM), arena.peer_views(0, count, ITEM)
        once: list[Callable[[], None]] = []

        def work(at: Workplace) -> None:
            if not once:
                site = at.transport, at.workspace, at.place
                once.append(
                    prepared(*site, mine, Reduction("sum")) if peers is None
                    else prepared_in_arena(*site, peers, Reduction("sum"))
                )  # fmt: skip
            once[0]()

        return on_lane(lane, mine, "ipc", work)

    return prepare


def forced(lane: Lane, buffer: Array, algorithm: str) -> Prepare:
    """One algorithm with messages, on an ordinary array."""

    def prepare(count: int) -> Trial:
        array = buffer[:count]

        def work(at: Workplace) -> None:
            place = replace(at.place, forced=algorithm)
            allreduce(at.transport, at.workspace, place, array, Reduction("sum"))

        return on_lane(lane, array, algorithm, work)

    return prepare


def unchunked(prepare: Prepare) -> Prepare:
    """The same, but long parts are not sent in chunks: the difference is the gain of chunks."""

    def whole(count: int) -> Trial:
        trial = prepare(count)

        def call() -> None:
            usual, pipeline.WHOLE = pipeline.WHOLE, sys.maxsize
            try:
                trial.call()
            finally:
                pipeline.WHOLE = usual

        return Trial(trial.array, call)

    return whole


def native(comm: MPI.Comm, buffer: Array) -> Prepare:
    """MPI_Allreduce, in place, with a device pointer."""

    def prepare(count: int) -> Trial:
        array = buffer[:count]

        def call() -> None:
            finish(array)  # MPI ignores streams
            comm.Allreduce(MPI.IN_PLACE, array, MPI.SUM)

        return Trial(array, call)

    return prepare


def gloo(buffer: Array) -> Prepare:
    """torch.distributed's all_reduce over gloo on CUDA tensors. Collective."""
    from hvdlite.torch.cuda import to_tensor

    distributed = start_gloo()

    def prepare(count: int) -> Trial:
        tensor = to_tensor(buffer[:count])
        return finished(buffer[:count], lambda: distributed.all_reduce(tensor))

    return prepare


def copying(buffer: Array, other: Array) -> Prepare:
    """A copy from one array to another, on all ranks' GPUs at once."""

    def prepare(count: int) -> Trial:
        source, target = buffer[:count], other[:count]
        return finished(None, lambda: cupy().copyto(target, source))

    return prepare
