"""WorkQueue on threads as ranks: each index once in each epoch, whatever the ranks' speeds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdlite.errors import MismatchError
from hvdlite.job.groups import Group
from hvdlite.strategies import work_queue
from hvdlite.strategies.staleness import BoundedStaleness
from hvdlite.strategies.work_queue import WorkQueue
from tests.unit.test_mailbox import mailbox_threads, on_groups
from tests.unit.test_staleness import Count


@pytest.fixture
def on_ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """`on_groups`, where each rank's queues find the rank's group."""
    here = threading.local()

    class Runtime:
        @staticmethod
        def group_of(process_set: object) -> Group:
            group: Group = here.group
            return group

    monkeypatch.setattr(work_queue, "runtime", Runtime)

    def run(size: int, function: Callable[[Group], Any], ends: bool = True) -> list[Any]:
        def rank_main(group: Group) -> Any:
            here.group = group
            return function(group)

        return on_groups(size, rank_main, ends)

    return run


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("count", "batch_size"), [(203, 5), (3, 4), (0, 1), (40, 1)])
@pytest.mark.parametrize("shuffle", [True, False])
def test_each_index_once(
    size: int, count: int, batch_size: int, shuffle: bool, on_ranks: Callable[..., list[Any]]
) -> None:
    epochs = 3

    def rank_main(group: Group) -> list[list[list[int]]]:
        queue, taken = WorkQueue(range(count), batch_size, shuffle), []
        assert len(queue) == -(-count // batch_size)
        for _ in range(epochs):
            taken.append(list(queue) if group.rank else [time.sleep(0.003) or batch for batch in queue])
        return taken

    everyone = on_ranks(size, rank_main)
    orders = []
    for epoch in range(epochs):
        batches = sorted(batch for taken in everyone for batch in taken[epoch])
        assert sorted(index for batch in batches for index in batch) == list(range(count))
        assert all(len(batch) == batch_size for batch in batches) or count % batch_size
        orders.append(batches)
    if count == 203:
        assert (orders[0] == orders[1]) is not shuffle
    assert not mailbox_threads()


def test_ranks_end_within_one_batch_of_each_other(on_ranks: Callable[..., list[Any]]) -> None:
    """Rank 0, which deals, is slow. The others get more batches."""
    times = [0.1, 0.01, 0.02]

    def rank_main(group: Group) -> tuple[int, float]:
        queue, taken = WorkQueue(100, 1), 0
        for _ in queue:
            time.sleep(times[group.rank])
            taken += 1
        return taken, time.monotonic()

    numbers, ends = zip(*on_ranks(3, rank_main), strict=True)
    assert sum(numbers) == 100 and numbers[1] > numbers[2] > numbers[0]
    assert max(ends) - min(ends) < 0.1 + 0.1, "one batch of the slowest rank, and some tolerance"


def test_equal_seeds_give_equal_orders(on_ranks: Callable[..., list[Any]]) -> None:
    orders = [on_ranks(1, lambda group, seed=seed: [*WorkQueue(50, 7, seed=seed)])[0] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_a_loop_that_is_left_early_leaves_the_rest_to_the_others(on_ranks: Callable[..., list[Any]]) -> None:
    def rank_main(group: Group) -> tuple[list[int], list[int]]:
        queue, first, second = WorkQueue(100, 1), [], []
        for indices in queue:
            first += indices
            if group.rank == 0:
                break
        for indices in queue:
            second += indices
        return first, second

    everyone = on_ranks(3, rank_main)
    for epoch in (0, 1):
        assert sorted(index for taken in everyone for index in taken[epoch]) == list(range(100))


@pytest.mark.parametrize("strategy", [BoundedStaleness(0), BoundedStaleness(clock=1), BoundedStaleness(age=1)])
def test_a_rank_whose_epoch_ends_does_not_hold_the_others_back(
    strategy: BoundedStaleness, on_ranks: Callable[..., list[Any]]
) -> None:
    """Batches do not divide by ranks. After the loop each rank waits for the others, outside of hvdlite."""

    def rank_main(group: Group) -> None:
        model, queue, taken = Count(group, strategy, 3, 3), WorkQueue(31, 1), 0
        for epoch in range(1, 4):
            for _ in queue:
                time.sleep(0.001 * group.rank)
                model.step()
                taken += 1
            group.transport.barrier()
            model.running.settle(model.weights)
            assert np.allclose(model.seen.sum(axis=1), 31 * epoch)
            assert (model.seen[:, group.rank] == taken).all()

    on_ranks(3, rank_main)


def test_different_arguments_are_an_error(on_ranks: Callable[..., list[Any]]) -> None:
    def rank_main(group: Group) -> None:
        with pytest.raises(MismatchError, match="batch_size"):
            WorkQueue(100, 1 + group.rank)

    on_ranks(2, rank_main)


@pytest.mark.parametrize(("count", "batch_size"), [(-1, 1), (5, 0)])
def test_impossible_sizes(count: int, batch_size: int) -> None:
    with pytest.raises(ValueError, match="WorkQueue"):
        WorkQueue(count, batch_size)
