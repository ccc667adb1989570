"""Bounded staleness over MPI: letters, synchronous training, bounds, settle, servers, and the end of the job."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np

import hvdlite as hvd
from hvdlite.job import runtime
from hvdlite.strategies import Running, Site
from hvdlite.strategies.staleness import BoundedStaleness, Server, Worker, staleness
from hvdlite.strategies.work_queue import WorkQueue
from tests.parallel.common import require_error, require_same_bits, restart

SIZES = (1, 2, 3, 4)


def start(strategy: BoundedStaleness, weights: list[np.ndarray]) -> Any:
    """Attach a strategy to these weights, as an adapter does."""
    group = runtime.current().everyone
    name = f"opt {group.serial('strategy')}"
    return strategy.start(Site(group, name, f"DistributedOptimizer {name}", [f"p{i}" for i in range(len(weights))]))


def step(running: Running, weights: list[np.ndarray], change: float) -> None:
    """One update that adds `change` to all weights."""
    assert running.update_begins()
    running.before_update(weights, [None] * len(weights))
    for weight in weights:
        weight += change
    assert running.update_ends()
    running.after_update(weights, {})


def mailbox_threads() -> int:
    """The number of mailboxes' threads in this process."""
    return sum(thread.name == "hvdlite-mailbox" for thread in threading.enumerate())


def check_zero_is_synchronous() -> None:
    """Also with long letters, which MPI sends in two steps."""
    p, r = hvd.size(), hvd.rank()
    weights = [np.zeros((3, 5)), np.zeros(400_000)]
    running = start(BoundedStaleness(0), weights)
    for number in range(1, 6):
        step(running, weights, r + 1.0)
        for weight in weights:
            np.testing.assert_allclose(weight, number * (p + 1) / 2, rtol=1e-12)
        require_same_bits(weights)
    running.close()
    assert mailbox_threads() == 0


def check_bounds_and_settle() -> None:
    p, r = hvd.size(), hvd.rank()
    for strategy in (BoundedStaleness(clock=2), BoundedStaleness(age=1), BoundedStaleness(None)):
        weights, delays = [np.zeros(7, np.float32), np.zeros(2, np.float32)], random.Random(r)
        running = start(strategy, weights)
        for turn in (1, 2):
            for _ in range(50):
                step(running, weights, 1.0)
                time.sleep(0.001 * delays.random())
            running.settle(weights)
            for weight in weights:
                np.testing.assert_allclose(weight, 50 * turn, rtol=1e-5)
            require_same_bits(weights)
        assert sum(running.counts.values()) == 100 and (strategy.age is None or max(running.counts) <= 1)
        assert isinstance(running, Worker) and sum(staleness().values()) >= 100
        if p > 1:
            assert mailbox_threads() == 1
        running.close()
    assert mailbox_threads() == 0


def check_a_rank_that_ends_early_goes_on_serving() -> None:
    """Rank 0 makes one update, and waits in a collective for the others, which make 40."""
    weights = [np.zeros(5)]
    running = start(BoundedStaleness(clock=1), weights)
    for _ in range(1 if hvd.rank() == 0 else 40):
        step(running, weights, 1.0)
    running.park()
    hvd.barrier()
    running.settle(weights)
    np.testing.assert_allclose(weights[0], (1 + 40 * (hvd.size() - 1)) / hvd.size())
    running.close()


def check_work_queue() -> None:
    """Each index once, in several epochs; rank 0, which deals, is slow."""
    queue = WorkQueue(101, batch_size=2, seed=3)
    assert len(queue) == 51
    for _ in range(3):
        mine = []
        for indices in queue:
            mine += indices
            time.sleep(0.002 if hvd.rank() else 0.01)
        everyone = hvd.allgather_object(mine)
        assert sorted(index for theirs in everyone for index in theirs) == list(range(101))
    queue.close()
    assert mailbox_threads() == 0


def check_the_job_ends_with_strategies_at_work() -> None:
    """A rank shuts down early, and the others go on with updates. `hvd.shutdown()` ends the threads."""
    weights = [np.zeros(5)]
    running = start(BoundedStaleness(clock=1), weights)
    for _ in range(1 if hvd.rank() == 0 else 20):
        step(running, weights, 1.0)
    hvd.shutdown()
    assert mailbox_threads() == 0
    restart()


def check_servers() -> None:
    """The last rank owns all parameters. It takes part in settle, and serves until the others shut down."""
    p = hvd.size()
    if p == 1:
        require_error(ValueError, lambda: start(BoundedStaleness(servers=1), [np.zeros(5)]), "leaves no worker")
        return
    weights: list[np.ndarray] = [np.zeros(5), np.zeros(3, np.float32)]
    running = start(BoundedStaleness(clock=1, servers=1), weights)
    if isinstance(running, Server):
        running.serve(lambda: running.settle(weights))
    else:
        for _ in range(10):
            step(running, weights, 1.0)
        running.settle(weights)
    for weight in weights:
        np.testing.assert_allclose(weight, 10, rtol=1e-6)
    restart()
    assert mailbox_threads() == 0
