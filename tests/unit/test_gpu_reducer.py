"""A reducer with buckets on GPUs, their memory, and NCCL, tested on the pretend CuPy (tests/pretend)."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms.reduction import Reduction
from hvdlite.errors import HvdliteError
from hvdlite.gradients.departure import Departure
from hvdlite.gradients.plan import Spec, plan
from hvdlite.gradients.reducer import Memory, Reducer
from hvdlite.gradients.use import Use
from hvdlite.lanes import gpu_side
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.signature import Round
from tests.pretend import cupy
from tests.pretend.lanes import expected, in_use, on_lanes, produced, stand_in, summed  # noqa: F401

KB = 1024


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["ring", "shared"])
def test_a_round_of_mixed_buckets(way: str, overlap: bool) -> None:
    """Parameters on the host and on the GPU are packed in the order of a backward, in three rounds."""
    specs = [Spec(f"p{i}", (40, i + 1), "float32", "cuda" if i % 3 else "host") for i in range(12)]

    def rank_main(lane: Lane) -> list[Any]:
        where = gpu_side.gpu_of(cupy.empty(1))
        reducer = Reducer(lane, plan(specs, 8 * KB, 1 * KB), Reduction(), "r", Departure(overlap), Memory(where))
        found = []
        for step in range(3):
            for i in reversed(range(len(specs))):
                if i != 5:
                    reducer.views[i][...] = np.full(specs[i].shape, i + step + lane.transport.rank)
                    reducer.mark_ready([i], Round("step {}", (step,)))

            def load(index: int) -> Use:
                reducer.views[index][...] = 0
                return Use.UNUSED

            uses = reducer.finish_round(load, Round("step {}", (step,)))
            assert [use is Use.UNUSED for use in uses] == [i == 5 for i in range(len(specs))]
            found.append([v.get() if i % 3 else v.copy() for i, v in enumerate(reducer.views)])
        return found

    for size in (1, 2, 3):
        for rounds in on_lanes(size, way, False, rank_main):
            for step, views in enumerate(rounds):
                for i, view in enumerate(views):
                    want = 0 if i == 5 else size * (i + step) + size * (size - 1) // 2
                    np.testing.assert_array_equal(view, np.full(specs[i].shape, want))


def test_no_room_on_one_gpu_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    order, take = itertools.count(), cupy.Memory
    mine = threading.local()  # the second rank that asks gets none, also if it asks again

    def memory(nbytes: int) -> Any:
        if nbytes > KB and not hasattr(mine, "place"):
            mine.place = next(order)
        if nbytes > KB and mine.place == 1:
            raise cupy.CUDARuntimeError("out of memory")
        return take(nbytes)

    def rank_main(lane: Lane) -> Any:
        where = gpu_side.gpu_of(cupy.empty(1))
        monkeypatch.setattr(cupy.cuda, "Memory", memory)
        with pytest.raises(HvdliteError, match=r"ranks \[[012]\] have no room"):
            Reducer(
                lane,
                plan([Spec("p", (4000,), "float32", "cuda")], 8 * KB, KB),
                Reduction(),
                "r",
                Departure(False),
                Memory(where),
            )

    on_lanes(3, "shared", True, rank_main)


def test_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user chooses NCCL, it adds the dtypes that it can. Each lane has a communicator, which ends with the lane."""
    bus = iter(range(100))
    monkeypatch.setattr(cupy.runtime, "deviceGetPCIBusId", lambda number: next(bus))

    def rank_main(lane: Lane) -> Any:
        found = [summed(lane, produced(lane, 99, kind), str(kind)) for kind in (np.float32, np.int16, np.complex64)]
        assert cupy.NcclCommunicator.open == 3
        return [array.get() for array in found]

    for results in on_lanes(3, "nccl", False, rank_main):
        for result in results:
            np.testing.assert_array_equal(result, expected(3, 99))
    assert cupy.NcclCommunicator.open == 0


def test_nccl_wants_a_gpu_for_each_rank() -> None:
    def rank_main(lane: Lane) -> None:
        with pytest.raises(HvdliteError, match=r"ranks \[0, 1\] share GPU 0000:00:00.0"):
            summed(lane, produced(lane, 3))

    on_lanes(2, "nccl", False, rank_main)


def test_a_new_plan_closes_the_memory_of_the_old_one() -> None:
    """Every opened handle is closed, and every allocation is freed."""
    specs = [Spec("p", (40,), "float32", "cuda")]

    def rank_main(lane: Lane) -> None:
        where = gpu_side.gpu_of(cupy.empty(1))
        for _ in range(5):
            Reducer(lane, plan(specs, 8 * KB, 1 * KB), Reduction(), "r", Departure(False), Memory(where))

    before = in_use()
    on_lanes(3, "shared", True, rank_main)
    assert [entry[0] for entry in cupy.LOG].count("open") == [entry[0] for entry in cupy.LOG].count("close") == 5 * 6
    assert in_use() == before
