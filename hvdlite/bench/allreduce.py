"""The all-reduce benchmark: sizes from bytes to hundreds of megabytes, all contenders in turns in one run.

Before each call a rank writes its array, as backward writes gradients. In the two-shot algorithm, one rank always reads
the same part. Without new writes no data would pass between cores, and the arena would seem up to ten times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
from mpi4py import MPI

from hvdlite import ops
from hvdlite.arrays import is_host, module
from hvdlite.bench.contenders import ITEM, Contender, Trial
from hvdlite.bench.network import most_sent
from hvdlite.bench.timing import Action, Progress, Quartiles, interleaved, rounds_for
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import on_host
from hvdlite.job import runtime

SMALL = 64 * 1024  # below this a turn is several calls: one is too short to time alone
CALLS_PER_SMALL_TURN = 10
LATENCY_SECONDS = 1.0


@dataclass(frozen=True)
class Row:
    """The results for one size.

    Attributes:
        nbytes: The size of each rank's array.
        count: The same in float32 elements.
        rounds: Turns per contender.
        seconds: Median seconds of each contender, by key.
        crowded: As in `timing.Timing`.
        sent: On several hosts, the bytes that the busiest host sent per call, by contender.
        spread: The quartiles of the seconds, by contender.
    """

    nbytes: int
    count: int
    rounds: int
    seconds: dict[str, float]
    crowded: float
    sent: dict[str, float] = field(default_factory=dict)
    spread: dict[str, Quartiles] = field(default_factory=dict)

    def algbw(self, key: str) -> float:
        """GB/s for the caller: bytes over time."""
        return self.nbytes / self.seconds[key] / 1e9

    def busbw(self, key: str, size: int) -> float:
        """GB/s on each rank's link, as nccl-tests defines it: algbw * 2(p-1)/p. size: the number of ranks, p."""
        return self.algbw(key) * 2 * (size - 1) / size


@dataclass(frozen=True)
class Sweep:
    """The results of one run.

    Attributes:
        size: The number of ranks.
        hosts: The number of hosts.
        titles: The contenders' titles, by key.
        rows: The results, by size.
        latency: Median seconds of a synchronous call on one scalar, by function. Empty on a GPU.
    """

    size: int
    hosts: int
    titles: dict[str, str]
    rows: list[Row]
    latency: dict[str, float] = field(default_factory=dict)


def sizes(least: int, most: int, step: int) -> list[int]:
    """Sizes in bytes: least, least * step, ... up to most."""
    found = [max(least, ITEM.itemsize)]
    while found[-1] * step <= most:
        found.append(found[-1] * step)
    return found


def sweep(
    comm: MPI.Comm,
    field_of: Sequence[Contender],
    nbytes: Sequence[int],
    rounds: int | None,
    seconds: float,
    progress: Progress,
) -> Sweep:
    """Time all contenders at all sizes. Collective; waits for all ranks.

    Args:
        comm: All ranks.
        field_of: The contenders, in the order of the tables.
        nbytes: The sizes, in bytes.
        rounds: Turns per contender and size; None: as many as fit into `seconds`.
        seconds: The time per size.
        progress: Called before each size.

    Returns:
        The results, equal on all ranks, without the latency.

    Raises:
        HvdliteError: A contender's sum is wrong.
    """
    rows = []
    for done, size in enumerate(nbytes):
        progress(done, len(nbytes), readable(size))
        rows.append(measure(comm, field_of, size, rounds, seconds))
    titles = {contender.key: contender.title for contender in field_of}
    return Sweep(comm.Get_size(), len(runtime.current().topology.hosts), titles, rows)


def measure(comm: MPI.Comm, field_of: Sequence[Contender], nbytes: int, rounds: int | None, seconds: float) -> Row:
    """Measure one size: verify every contender's sum, then time them in turns. Collective."""
    count = nbytes // ITEM.itemsize
    trials = {c.key: c.prepare(count) for c in field_of}
    for key, trial in trials.items():
        verify(key, trial, comm)
    actions = {key: trial.call for key, trial in trials.items()}
    calls = CALLS_PER_SMALL_TURN if nbytes <= SMALL else 1
    rounds = rounds or rounds_for(actions, comm, seconds, calls)
    timing = interleaved(actions, comm, rounds, calls, before=backward(trials, count))
    sent = {}
    if not runtime.current().topology.one_host:
        sent = {key: most_sent(comm, action, calls) for key, action in actions.items()}
    return Row(nbytes, count, rounds, timing.seconds, timing.crowded, sent, timing.spread)


def backward(trials: Mapping[str, Trial], count: int) -> dict[str, Callable[[], None]]:
    """For each trial with an array on the host, a call that writes the array, like backward.

    Arrays on a GPU are not written: all ranks may share one GPU.
    """
    gradient = np.full(count, 0, ITEM)  # not `zeros`: all of its pages may be one page in memory
    arrays = {key: trial.array for key, trial in trials.items() if trial.array is not None and is_host(trial.array)}
    return {key: partial(np.copyto, cast(np.ndarray, array), gradient) for key, array in arrays.items()}


def verify(key: str, trial: Trial, comm: MPI.Comm) -> None:
    """Check the sum of i % 7 + rank: p ranks give p (i % 7) + p(p-1)/2, exactly. Leaves zeros, with zeros as sums."""
    if trial.array is None:
        return
    xp, size, pattern = module(trial.array), comm.Get_size(), (np.arange(trial.array.size) % 7).astype(ITEM)
    trial.array[:] = xp.asarray(pattern + comm.Get_rank())
    comm.Barrier()
    trial.call()
    wrong = np.flatnonzero(on_host(trial.array) != size * pattern + size * (size - 1) // 2)
    if wrong.size:
        raise HvdliteError(
            f"{key}: rank {comm.Get_rank()} has a wrong sum of {trial.array.size} elements: {wrong.size} differ, the "
            f"first at {wrong[0]}. This is a bug in the contender; nothing was timed."
        )
    comm.Barrier()
    trial.array[:] = 0


def scalar_latency(comm: MPI.Comm) -> dict[str, float]:
    """Median seconds of synchronous all-reduces of one float32, by function. Collective.

    A lane's thread starts with the first asynchronous call, and stays. So each function is timed before such a call and
    after it.
    """
    one = np.ones(1, ITEM)
    actions: dict[str, Action] = {"hvdlite.ops.allreduce_": lambda: ops.allreduce_(one)}
    try:
        actions |= scalar_torch()
    except ImportError:
        pass
    rounds = rounds_for(actions, comm, LATENCY_SECONDS, CALLS_PER_SMALL_TURN)
    first = interleaved(actions, comm, rounds, CALLS_PER_SMALL_TURN)
    ops.allreduce_.start(np.ones(1, ITEM)).wait()
    later = interleaved(actions, comm, rounds, CALLS_PER_SMALL_TURN)
    return first.seconds | {f"{name}, after an asynchronous call": time for name, time in later.seconds.items()}


def scalar_torch() -> dict[str, Action]:
    """All-reduces of a torch tensor with one element. Raises ImportError without torch."""
    import torch

    import hvdlite.torch as hvd_torch

    one = torch.ones(1)
    return {
        "hvdlite.torch.allreduce_": lambda: hvd_torch.allreduce_(one),
        "hvdlite.torch.allreduce": lambda: hvd_torch.allreduce(one),
    }


def readable(nbytes: int) -> str:
    """'4 B', '64 KiB', '16 MiB'."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale and nbytes % scale == 0:
            return f"{nbytes // scale} {unit}"
    return f"{nbytes} B"


def one_line(title: str) -> str:
    """A contender's title without the line breaks for tables."""
    return title.replace("-\n", "-").replace("_\n", "_").replace("\n", " ")
