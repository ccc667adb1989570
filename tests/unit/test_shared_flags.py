"""Agreements in shared memory, as sequences of steps of all ranks, in every possible order."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from hvdlite.arrays import LINE
from hvdlite.transports.shared_flags import LINES, PATIENCE, SharedMaximum


def made(size: int, looks: list[int] | None = None) -> list[SharedMaximum]:
    """One agreement for each rank."""
    lines = [np.zeros(LINES * LINE, np.uint8) for _ in range(size)]
    return [SharedMaximum(lines, rank, (looks if looks is not None else []).append) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_largest_of_all(size: int) -> None:
    ranks = made(size)
    for call in range(5):
        for rank, each in enumerate(ranks):
            each.start((-(1 << 62) + rank, rank - 10 * call, (1 << 62) if rank == call % size else 0, 1, 0))
            assert each.test() == (rank == size - 1)
        assert all(
            each.test() and list(each.values) == [-(1 << 62) + size - 1, size - 1 - 10 * call, 1 << 62, 1, 0]
            for each in ranks
        )


def five(value: int) -> tuple[int, ...]:
    return (value, *[0] * 4)


def test_who_is_late_reads_the_last_calls_values() -> None:
    """The other ranks are at most one call ahead."""
    early, late = made(2)
    early.start(five(1))
    late.start(five(2))
    assert early.test() and early.values == [2, *[0] * 4]
    early.start(five(30))
    assert not early.test()
    assert late.test() and late.values == [2, *[0] * 4]
    late.start(five(4))
    assert late.test() and early.test() and late.values == early.values == [30, *[0] * 4]


@pytest.mark.parametrize("place", range(5))
def test_who_comes_last_is_told_at_once_where_all_gave_the_same(place: int) -> None:
    """The last rank has all five values at once."""
    same = tuple(range(5))
    other = tuple(value + (index == place) for index, value in enumerate(same))
    ranks = made(3)
    for call in range(4):
        for each in ranks[:2]:
            assert not each.start(same)
        assert ranks[2].start(other if call % 2 else same) == (not call % 2)
        assert all(each.test() and tuple(each.values) == (other if call % 2 else same) for each in ranks)


def test_who_comes_to_a_barrier_first_waits() -> None:
    """The rank looks at MPI meanwhile."""
    looks: list[int] = []
    first, second = made(2, looks)
    for _ in range(3):
        looks.clear()
        thread = threading.Thread(target=first.meet)
        thread.start()
        while len(looks) < 3:
            assert thread.is_alive()
        second.meet()
        thread.join(5)
        assert not thread.is_alive() and set(looks) == {1}


def test_mpi_is_looked_at_while_a_rank_is_waited_for() -> None:
    looks: list[int] = []
    ranks = made(3, looks)
    ranks[0].start(five(0))
    ranks[2].start(five(0))
    for _ in range(3 * PATIENCE):
        assert not ranks[0].test()
    assert looks == [1] * 3
    thread = threading.Thread(target=ranks[0].test)  # nothing else there releases the GIL
    thread.start()
    thread.join()
    assert looks == [1] * 4


def test_ranks_side_by_side() -> None:
    ranks, calls = made(4), 40
    found: list[list[int]] = [[] for _ in ranks]

    def run(rank: int) -> None:
        for call in range(calls):
            ranks[rank].start(five(call * 10 + (rank + call) % 4))
            while not ranks[rank].test():
                time.sleep(0)
            found[rank].append(ranks[rank].values[0])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[call * 10 + 3 for call in range(calls)]] * 4
