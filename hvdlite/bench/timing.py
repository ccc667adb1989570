"""Fair timing on a machine with other load: contenders take turns, and the median counts.

    round 1:  B A C      every turn begins with a barrier: no contender waits for ranks that another has delayed
    round 2:  A C B      the order changes, equally on all ranks: no contender always follows the same one

The time of one call is that of the slowest rank. The time of a contender is the median over its calls.
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

Action: TypeAlias = Callable[[], object]
"""A call to be timed."""
Progress: TypeAlias = Callable[[int, int, str], None]
"""Shows how far a benchmark has come: called as progress(done, total, text)."""
Floats: TypeAlias = npt.NDArray[np.float64]
Quartiles: TypeAlias = tuple[float, float]
"""The lower and the upper quartile of times: half of them lie between the two."""
FEWEST_ROUNDS, MOST_ROUNDS = 7, 300
LIBC = ctypes.CDLL(None)
NOTHING: Mapping[str, Action] = MappingProxyType({})


@dataclass(frozen=True)
class Timing:
    """The times of several actions.

    Attributes:
        seconds: Median seconds per call, by action.
        crowded: The part of the turns (0 to 1) in which two ranks of a host were on one core. If it is large, other
            programs were running, and the times are those of a smaller machine.
        rounds: The slowest rank's seconds, by action, of shape (rounds, calls).
    """

    seconds: dict[str, float]
    crowded: float
    rounds: dict[str, Floats]

    @property
    def spread(self) -> dict[str, Quartiles]:
        """The quartiles of the seconds per call, by action."""
        return {name: quartiles(times) for name, times in self.rounds.items()}


def quartiles(times: npt.ArrayLike) -> Quartiles:
    """The lower and the upper quartile of some numbers, by linear interpolation."""
    low, high = np.percentile(np.asarray(times, np.float64), (25, 75)).tolist()
    return low, high


def interleaved(
    actions: Mapping[str, Action],
    comm: MPI.Comm,
    rounds: int,
    calls: int = 1,
    warm: bool = True,
    before: Mapping[str, Action] = NOTHING,
) -> Timing:
    """Time each action in `rounds` turns of `calls` calls. Collective over comm.

    Args:
        actions: The calls to be timed, by name.
        comm: The ranks.
        rounds: The turns of each action.
        calls: The timed calls per turn.
        warm: Whether each turn begins with a call that is not timed. It brings buffers into the caches.
        before: By action, a call before each timed call and its barrier. It is not timed.

    Returns:
        The times, equal on all ranks.
    """
    times = {name: np.empty((rounds, calls)) for name in actions}
    cores = np.empty(rounds * len(actions), np.int64)
    order, shuffled = list(actions), random.Random(0)  # the same seed, and so the same order, on every rank
    for round_ in range(rounds):
        shuffled.shuffle(order)
        for place, name in enumerate(order):
            turn(actions[name], comm, times[name][round_], warm, before.get(name))
            cores[round_ * len(order) + place] = LIBC.sched_getcpu()
    slowest = {name: slowest_of(comm, times[name]) for name in actions}
    return Timing({name: float(np.median(slowest[name])) for name in actions}, crowding(comm, cores), slowest)


def turn(action: Action, comm: MPI.Comm, times: Floats, warm: bool, before: Action | None) -> None:
    """Time one turn: fill `times`, one number of seconds per call, in place."""
    if warm:
        comm.Barrier()
        action()
    for call in range(len(times)):
        if before:
            before()
        comm.Barrier()
        began = time.perf_counter()
        action()
        times[call] = time.perf_counter() - began


def slowest_of(comm: MPI.Comm, times: npt.ArrayLike) -> Floats:
    """The largest time over ranks, for each call. Collective."""
    slowest = np.ascontiguousarray(times, np.float64).copy()
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest


def crowding(comm: MPI.Comm, cores: npt.NDArray[np.int64]) -> float:
    """The part of the turns in which two ranks of one host were on one core. cores: this rank's core in each turn."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    everyone = np.sort(np.array(host.allgather(cores)), axis=0)
    host.Free()
    return float(comm.allreduce(np.mean(np.any(everyone[1:] == everyone[:-1], axis=0)), MPI.MAX))


def pin(comm: MPI.Comm) -> None:
    """Give the calling thread of each rank a core of its own, if there are enough cores. Collective.

    Otherwise gloo draws two ranks onto one core, since its messages wake a rank on the sender's core. They stay there,
    and contenders that spin take four times as long. Threads that exist already, such as gloo's, run on any core.
    """
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = sorted(os.sched_getaffinity(0))
    if comm.allreduce(len(cores) >= host.Get_size(), MPI.LAND):
        os.sched_setaffinity(0, {cores[host.Get_rank()]})
    host.Free()


def rounds_for(actions: Mapping[str, Action], comm: MPI.Comm, seconds: float, calls: int, warm: bool = True) -> int:
    """The number of rounds that fit into some time, from one trial round. Collective; equal on all ranks.

    Args:
        actions: The calls to be timed, by name.
        comm: The ranks.
        seconds: The time for all rounds.
        calls: The timed calls per turn.
        warm: As for `interleaved`.

    Returns:
        At least FEWEST_ROUNDS, at most MOST_ROUNDS.
    """
    trial = interleaved(actions, comm, 1, calls, warm)
    one_round = sum(trial.seconds.values()) * (calls + warm)
    return min(max(int(seconds / max(one_round, 1e-9)), FEWEST_ROUNDS), MOST_ROUNDS)
