"""Fair timing on a machine that is never quiet: contenders take turns, and what counts is the median.

    round 1:  B A C      every turn starts with a barrier, so that no contender pays for another's skew;
    round 2:  A C B      the order changes (alike on all ranks), so that none always follows the same one
    time of one call = the slowest rank's; of a contender = the median over its calls
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

Action = Callable[[], Any]
FEWEST_ROUNDS, MOST_ROUNDS = 7, 300


def interleaved(
    actions: Mapping[str, Action],
    comm: MPI.Comm,
    rounds: int,
    calls: int = 1,
    warm: bool = True,
    after_round: Action | None = None,
) -> dict[str, float]:
    """Median seconds per call of each action, over `rounds` turns of `calls` calls. Collective over comm.

    warm: each turn begins with a call that is not timed, so that its buffers are in whatever cache they fit.
    """
    times = {name: np.empty((rounds, calls)) for name in actions}
    order, shuffled = list(actions), random.Random(0)  # the same seed, and so the same order, on every rank
    for round_ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            turn(actions[name], comm, times[name][round_], warm)
        if after_round:
            after_round()
    return {name: slowest_median(comm, times[name]) for name in actions}


def turn(action: Action, comm: MPI.Comm, times: Any, warm: bool) -> None:
    """Fill `times` (seconds, one per call)."""
    if warm:
        comm.Barrier()
        action()
    for call in range(len(times)):
        comm.Barrier()
        began = time.perf_counter()
        action()
        times[call] = time.perf_counter() - began


def slowest_median(comm: MPI.Comm, times: Any) -> float:
    """The median over calls of the largest time over ranks, in seconds. times: shape (rounds, calls)."""
    slowest = np.ascontiguousarray(times, np.float64)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    return float(np.median(slowest))


def rounds_for(actions: Mapping[str, Action], comm: MPI.Comm, seconds: float, calls: int) -> int:
    """How many rounds fit into `seconds`, from one trial round; equal on all ranks, within sensible limits."""
    trial = interleaved(actions, comm, 1, calls)
    one_round = sum(trial.values()) * (calls + 1)
    return min(max(int(seconds / max(one_round, 1e-9)), FEWEST_ROUNDS), MOST_ROUNDS)
