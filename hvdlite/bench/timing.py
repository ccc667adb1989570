"""Fair timing on a machine with other load: contenders take turns, and the median counts.

    round 1:  B A C      every turn starts with a barrier, so that no contender pays for another's skew;
    round 2:  A C B      the order changes (equal on all ranks), so that no contender always follows the same one
    time of one call = the slowest rank's; of a contender = the median over its calls
"""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from mpi4py import MPI

Action = Callable[[], Any]
FEWEST_ROUNDS, MOST_ROUNDS = 7, 300
LIBC = ctypes.CDLL(None)
NOTHING: Mapping[str, Action] = MappingProxyType({})


@dataclass(frozen=True)
class Timing:
    """seconds: median per call, by action. crowded: the part of the turns (0 to 1) that two ranks of a host began on
    one core. Where it is large, other programs were running, and the times are those of half a machine. rounds: the
    slowest rank's seconds, by action, of shape (rounds, calls)."""

    seconds: dict[str, float]
    crowded: float
    rounds: dict[str, Any]


def interleaved(
    actions: Mapping[str, Action],
    comm: MPI.Comm,
    rounds: int,
    calls: int = 1,
    warm: bool = True,
    before: Mapping[str, Action] = NOTHING,
) -> Timing:
    """Time each action in `rounds` turns of `calls` calls. Collective over comm.

    warm: each turn begins with a call that is not timed, so that its buffers are in whatever cache they fit.
    before: what is done ahead of each timed call of an action, ahead of the barrier, not timed itself.
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


def turn(action: Action, comm: MPI.Comm, times: Any, warm: bool, before: Action | None) -> None:
    """Fill `times` (seconds, one per call)."""
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


def slowest_of(comm: MPI.Comm, times: Any) -> Any:
    """The largest time over ranks of each call."""
    slowest = np.ascontiguousarray(times, np.float64).copy()
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return slowest


def crowding(comm: MPI.Comm, cores: Any) -> float:
    """The part of the turns in which two ranks of this host were on one core. cores: this rank's, one per turn."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    everyone = np.sort(np.array(host.allgather(cores)), axis=0)
    host.Free()
    return float(comm.allreduce(np.mean(np.any(everyone[1:] == everyone[:-1], axis=0)), MPI.MAX))


def pin(comm: MPI.Comm) -> None:
    """Give the calling thread of each rank a core of its own, where there are enough. Collective.

    Without it gloo, whose messages wake a peer on the sender's own core, draws two ranks onto one, and they stay
    there: every contender that spins for a message then took four times as long (90 us instead of 20, at 4 bytes).
    Threads that exist already, gloo's among them, stay free to run anywhere.
    """
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    cores = sorted(os.sched_getaffinity(0))
    if comm.allreduce(len(cores) >= host.Get_size(), MPI.LAND):
        os.sched_setaffinity(0, {cores[host.Get_rank()]})
    host.Free()


def rounds_for(actions: Mapping[str, Action], comm: MPI.Comm, seconds: float, calls: int, warm: bool = True) -> int:
    """How many rounds fit into `seconds`, from one trial round; equal on all ranks, within sensible limits."""
    trial = interleaved(actions, comm, 1, calls, warm)
    one_round = sum(trial.seconds.values()) * (calls + warm)
    return min(max(int(seconds / max(one_round, 1e-9)), FEWEST_ROUNDS), MOST_ROUNDS)
