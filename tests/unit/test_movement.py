"""Broadcast, all-gather, all-to-all and reduce-scatter on threads: odd numbers of ranks, uneven and empty pieces."""

from __future__ import annotations

import time

import ml_dtypes
import numpy as np
import pytest

from hvdlite.algorithms import Place, movement, through_memory
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import LINE, Array
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import HostWorkplace
from hvdlite.ops import movement as movement_ops
from hvdlite.ops import reductions
from hvdlite.transports.threads import ThreadTransport, run_ranks

SIZES = range(1, 8)


@pytest.mark.parametrize("size", SIZES)
def test_everyone_has_the_roots_data(size: int) -> None:
    for root in range(size):

        def rank_main(transport: ThreadTransport, root: int = root) -> np.ndarray:
            buffer = np.full(5, transport.rank)
            movement.broadcast(transport, buffer, root)
            return buffer

        assert all((buffer == root).all() for buffer in run_ranks(size, rank_main))


@pytest.mark.parametrize("hosts", [
    ((0, 1, 2), (3, 4, 5)), ((0, 2, 4), (1, 3, 5)), ((0,), (1, 2, 3, 4, 5)), ((3, 4), (0, 1), (2, 5)),
])  # fmt: skip
def test_a_broadcast_enters_each_host_once(hosts: tuple[tuple[int, ...], ...]) -> None:
    """That holds for any numbering of ranks, and for any root."""
    home = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    for root in range(6):
        crossed: list[int] = []

        class Watching(ThreadTransport):
            def send(self, array: Array, dest: int) -> None:
                if home[dest] != home[self.rank]:
                    crossed.append(home[dest])
                super().send(array, dest)

        def rank_main(transport: ThreadTransport, root: int = root) -> np.ndarray:
            transport.__class__ = Watching
            buffer = np.full(5, transport.rank)
            movement.broadcast(transport, buffer, root, hosts)
            return buffer

        assert all((buffer == root).all() for buffer in run_ranks(6, rank_main))
        assert sorted(crossed) == sorted(set(range(len(hosts))) - {home[root]})


@pytest.mark.parametrize("size", SIZES)
def test_rank_r_gives_r_rows_to_all(size: int) -> None:
    """The gathered array holds r rows of r from each rank, and none from rank 0."""

    def rank_main(transport: ThreadTransport) -> Array:
        lane = Lane(transport, Place(size, False))
        return movement_ops.gathered(lane.host, np.full((transport.rank, 2), transport.rank))

    expected = np.repeat(np.repeat(range(size), range(size))[:, None], 2, axis=1)
    for result in run_ranks(size, rank_main):
        np.testing.assert_array_equal(result, expected)


class Counting(ThreadTransport):
    """Counts its messages."""

    messages = 0

    def send(self, array: Array, dest: int) -> None:
        self.messages += 1
        super().send(array, dest)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("equal", [True, False])
def test_rows_that_are_equal_everywhere_need_no_messages(size: int, equal: bool) -> None:
    def rank_main(transport: ThreadTransport) -> None:
        counting = Counting(transport.board, transport.rank)
        lane, rows = Lane(counting, Place(size, False)), 2 if equal else transport.rank
        array = np.full(rows, transport.rank)
        work = Request(Signature("allgather", "x"), lambda lane: movement_ops.gathered(lane, array),
                       count=movement_ops.count_of([array]))  # fmt: skip
        assert len(lane.run(work)) == (2 * size if equal else size * (size - 1) // 2)
        assert counting.messages == (size - 1) * (1 if equal else 2)

    run_ranks(size, rank_main)


@pytest.mark.parametrize("size", SIZES)
def test_what_a_sends_to_b_is_what_b_has_from_a(size: int) -> None:
    """Rank a sends a pieces of value 10 a + b to rank b. Lengths differ, and rank 0 sends nothing."""

    def rank_main(transport: ThreadTransport) -> list[np.ndarray]:
        outgoing = [np.full(transport.rank, 10 * transport.rank + dest) for dest in range(size)]
        incoming = [np.full(source, -1) for source in range(size)]
        movement.alltoall(transport, outgoing, incoming)
        return incoming

    for rank, incoming in enumerate(run_ranks(size, rank_main)):
        for source, piece in enumerate(incoming):
            assert piece.tolist() == [10 * source + rank] * source


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_each_rank_has_its_rows_of_the_sum(size: int, dtype: str) -> None:
    """Rows are divided evenly, and the first ranks have one more. Rank r adds r to every element."""
    kind = np.dtype(getattr(ml_dtypes, dtype)) if dtype == "bfloat16" else np.dtype(dtype)
    for rows in (0, 1, size - 1, size, size + 1, 3 * size + 2):
        base = np.arange(rows * 2).reshape(rows, 2) % 5

        def rank_main(transport: ThreadTransport, base: np.ndarray = base) -> Array:
            mine = (base + transport.rank).astype(kind)
            result = reductions.own_rows(
                HostWorkplace(transport, Place(size, False), range(size)), mine, Reduction("sum")
            )
            np.testing.assert_array_equal(mine, (base + transport.rank).astype(kind))  # unchanged
            return result

        results = run_ranks(size, rank_main)
        expected = (base * size + size * (size - 1) // 2).astype(kind)
        np.testing.assert_array_equal(np.concatenate(results), expected)
        assert [len(result) for result in results] == [rows // size + (r < rows % size) for r in range(size)]


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_reduce_scatter_with_less_memory_than_there_is_to_add(size: int, dtype: str) -> None:
    """No rank overwrites memory that a slow rank has yet to read, in the same call or the next one.

    Sums of small integers are exact, at odd lengths.
    """
    arrays = [((np.arange(size * 301) + 7 * rank) % 13).astype(dtype) for rank in range(size)]
    memory = [np.full(2 * size * LINE + 8, 3, np.uint8) for _ in range(size)]

    def rank_main(transport: ThreadTransport) -> list[np.ndarray]:
        barrier, how = transport.barrier, Reduction("sum", after=2.0)

        def slow() -> None:
            barrier()
            time.sleep(0.002 * (transport.rank == size - 1))

        transport.barrier = slow
        results = []
        for turn in range(2):
            results.append(np.empty(301, dtype))
            parts = [*(arrays[transport.rank] + turn).astype(dtype).reshape(size, 301)]
            through_memory.reduce_scatter(transport, memory, parts, results[-1], how)
        return results

    for rank, results in enumerate(run_ranks(size, rank_main)):
        for turn, result in enumerate(results):
            np.testing.assert_array_equal(result, 2 * (np.sum(arrays, 0).reshape(size, 301)[rank] + turn * size))


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_reduce_scatter_through_memory_into_the_part_itself(size: int) -> None:
    """The result may be this rank's own part. Its values are read before they are overwritten."""
    memory = [np.zeros(4 * size * LINE, np.uint8) for _ in range(size)]
    arrays = [np.arange(size * 301, dtype=np.float32) * (rank + 1) ** 2 for rank in range(size)]

    def rank_main(transport: ThreadTransport) -> np.ndarray:
        parts = [*arrays[transport.rank].copy().reshape(size, 301)]
        through_memory.reduce_scatter(transport, memory, parts, parts[transport.rank], Reduction())
        return parts[transport.rank]

    expected = np.arange(size * 301, dtype=np.float32).reshape(size, 301) * sum((rank + 1) ** 2 for rank in range(size))
    for rank, result in enumerate(run_ranks(size, rank_main)):
        np.testing.assert_array_equal(result, expected[rank])
