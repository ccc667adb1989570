"""Small gradients by way of outboxes, on threads as ranks: the two-shot's bits, and nothing is written that others read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite import outbox
from hvdlite.algorithms import Place, shared
from hvdlite.algorithms.reduction import Reduction
from hvdlite.buckets import Spec, plan
from hvdlite.engine import Lane
from hvdlite.reducer import Reducer, Use
from hvdlite.requests import Round
from hvdlite.transports.threads import ThreadTransport, run_ranks

WORDS = "round {}"
SPECS = [Spec(f"p{i}", (40, i + 1), "float32") for i in range(4)]


@pytest.mark.parametrize(("dtype", "operation", "before"), [
    ("float32", "sum", 1.0), ("float64", "max", 1.0), ("float16", "sum", 1.0), ("bfloat16", "sum", 1.0), ("int32", "sum", 1.0),
    ("float32", "sum", 0.5), ("bool", "sum", 1.0),
])  # fmt: skip
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_one_shot_has_the_bits_of_the_two_shot(size: int, dtype: str, operation: str, before: float) -> None:
    kind, length = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), 120_001
    how = Reduction(operation, before, 1.0, 1 if dtype == "bool" else size)
    given = [np.random.default_rng(rank).uniform(-90, 90, length).astype(kind) for rank in range(size)]
    buffers = [array.copy() for array in given]

    def rank_main(transport: ThreadTransport) -> np.ndarray:
        mine = np.full(length, 7).astype(kind)
        shared.one_shot(buffers, mine, how)()
        transport.barrier()
        assert buffers[transport.rank].tobytes() == given[transport.rank].tobytes()
        transport.barrier()
        shared.prepared(transport, buffers, how)()
        return mine

    for rank, found in enumerate(run_ranks(size, rank_main)):
        assert found.tobytes() == buffers[rank].tobytes()


def on_reducers(size: int, function: Callable[[Reducer], Any], specs: list[Spec] = SPECS, bucket: int = 1 << 20) -> list[Any]:
    """function(reducer) on `size` ranks at once, which share memory: averages."""

    def rank_main(transport: ThreadTransport) -> Any:
        lane = Lane(transport, Place(transport.size, True))
        result = function(Reducer(lane, plan(specs, bucket, bucket), Reduction(divisor=size), "r", False))
        lane.leave()
        return result

    return run_ranks(size, rank_main)


def finish(reducer: Reducer, number: int) -> None:
    reducer.finish_round(lambda index: Use.DENSE, Round(WORDS, (number,)))


@pytest.mark.parametrize("size", [2, 3])
def test_who_reads_late_still_reads_what_was_meant(size: int) -> None:
    """A rank that is slow to add up, while others go on to their next backward and copy its gradients."""

    def rank_main(reducer: Reducer) -> list[float]:
        assert reducer.outbox is not None
        rank, found = reducer.lane.transport.rank, []
        for turn, add_up in enumerate(reducer.outbox.sums):
            reducer.outbox.sums[turn] = lambda add_up=add_up: (time.sleep(0.02 * rank), add_up())
        for number in range(6):
            for place in reducer.outbox.places[reducer.outbox.turn]:
                place[...] = 10 * number + rank
            reducer.mark_all({})
            finish(reducer, number)
            found.append({float(value) for view in reducer.views for value in view.flat})
        return found

    for found in on_reducers(size, rank_main):
        assert found == [{10 * number + (size - 1) / 2} for number in range(6)]


def test_gradients_that_lie_where_results_will() -> None:
    """Where some came singly, all are in their views: on one rank only, and in turn with rounds that are as usual."""

    def rank_main(reducer: Reducer) -> list[float]:
        assert reducer.outbox is not None
        rank, found = reducer.lane.transport.rank, []
        for number in range(4):
            usual = (number + rank) % 2 == 0
            for place in reducer.outbox.places[reducer.outbox.turn] if usual else reducer.views:
                place[...] = number + rank
            if usual:
                reducer.mark_all({})
            else:
                reducer.mark_ready(range(len(SPECS)), Round(WORDS, (number,)))
            finish(reducer, number)
            found.append({float(value) for view in reducer.views for value in view.flat})
        return found

    assert on_reducers(2, rank_main) == [[{number + 0.5} for number in range(4)]] * 2


def test_while_ranks_have_joined_the_outbox_is_taken_back() -> None:
    def rank_main(reducer: Reducer) -> None:
        assert reducer.outbox is not None
        for place in reducer.outbox.places[0]:
            place[...] = 3.0
        reducer.mark_all({})
        reducer.lane.without_all = True
        assert not reducer.buckets[0].reduce(reducer.lane)
        assert reducer.outbox.turn == 0
        assert all((view == 3.0).all() for view in reducer.views)

    on_reducers(2, rank_main)


@pytest.mark.parametrize(("specs", "bucket"), [
    ([Spec("p", (outbox.MOST_BYTES // 8 + 1,), "float32")], 1 << 30), (SPECS, 1000),
    ([*SPECS, Spec("q", (4,), "float64")], 1 << 20),
])  # fmt: skip
def test_others_share_the_arena_itself(specs: list[Spec], bucket: int) -> None:
    """Large ones, several buckets, several dtypes."""

    def rank_main(reducer: Reducer) -> None:
        assert reducer.outbox is None
        own = reducer.arenas["host"].own
        assert all(np.shares_memory(view, own) for view in reducer.views)

    on_reducers(2, rank_main, specs, bucket)
