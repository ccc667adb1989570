"""Comparisons between ranks: differences, and values that cannot be compared."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.errors import ShutdownError
from hvdlite.gradients.replica_check import NONE, Schedule, Values, apart, checksum, compared
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.transports.threads import ThreadTransport, run_ranks


def test_only_what_all_can_tell_is_compared() -> None:
    same, other, unknown, lacking = (("weights", name) for name in ("same", "other", "unknown", "lacking"))
    everyone: list[Values] = [{same: 1, other: 2, unknown: 3, lacking: 4}, {same: 1, other: 5, unknown: None}]
    assert apart(everyone, (4, 6)) == {other: [(2, [4]), (5, [6])], lacking: [(4, [4]), (NONE, [6])]}


def test_the_rounds_of_comparisons() -> None:
    """They double up to 512, then follow every 500 rounds."""
    schedule, found = Schedule(begin=1), []
    for _ in range(2100):
        schedule.count()
        if schedule.due:
            found.append(schedule.rounds)
            schedule.compared()
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1012, 1512, 2012]
    assert not schedule.first
    schedule.start_over()
    assert schedule.first and schedule.rounds == 0 and not schedule.due


def test_every_byte_counts() -> None:
    for length in range(1, 20):
        array = np.arange(length, dtype=np.uint8)
        assert checksum(array) == checksum(np.arange(2 * length, dtype=np.uint8)[:length])
        for place in range(length):
            changed = array.copy()
            changed[place] += 1
            assert checksum(changed) != checksum(array), (length, place)


@pytest.mark.parametrize("value", [1, float("nan"), None])
def test_values_travel_only_where_some_differ(value: Any) -> None:
    gathered: list[int] = []

    def rank_main(transport: ThreadTransport) -> None:
        lane, gather = Lane(transport, Place(2, False)), transport.allgather_object
        transport.allgather_object = lambda item: (gathered.append(1), gather(item))[1]  # type: ignore[assignment]
        assert compared(lane, "optimizer.1", {("weights", "w"): value}) == {} and not gathered
        found = compared(lane, "optimizer.1", {("weights", "w"): transport.rank})
        assert found == {("weights", "w"): [(0, [0]), (1, [1])]} and gathered

    run_ranks(2, rank_main)


@pytest.mark.parametrize(("brought", "told"), [
    (({"a": 1}, {"a": 1}), []),
    (({"a": 1}, {"a": 2}), ["a"]),
    (({"a": 1, "b": 1}, {"a": 2}), ["a"]),  # the other rank's optimizer is gone
    (({"a": 1}, {}), []),
    (({}, {}), []),
])  # fmt: skip
def test_what_differs_when_all_leave(brought: Any, told: list[str]) -> None:
    """If a value differs, all ranks get all ranks' values."""
    heard: list[list[Any]] = [[], []]

    def rank_main(transport: ThreadTransport) -> None:
        def hear(name: str, everyone: object) -> None:
            heard[transport.rank].append((name, everyone))

        lane = Lane(transport, Place(2, False))
        for name, value in brought[transport.rank].items():
            values = {("weights", "w"): value}
            lane.farewell.bring(name, values, partial(hear, name))
        lane.leave()

    run_ranks(2, rank_main)
    expected = [(name, [{("weights", "w"): rank[name]} for rank in brought]) for name in told]
    assert heard == [expected, expected]


def test_a_rank_that_leaves_ends_what_others_wait_for() -> None:
    """That holds also if the rank brings values for the last comparison."""

    def rank_main(transport: ThreadTransport) -> None:
        lane = Lane(transport, Place(2, False))
        lane.farewell.bring("a", {("weights", "w"): transport.rank}, lambda everyone: None)
        if transport.rank == 0:
            with pytest.raises(ShutdownError):
                lane.run(Request(Signature("allreduce", "x"), lambda lane: None))
        lane.leave()

    run_ranks(2, rank_main)
