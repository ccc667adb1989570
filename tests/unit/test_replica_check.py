"""Comparisons of ranks: what differs, and what cannot be told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.errors import ShutdownError
from hvdlite.gradients.replica_check import NONE, Values, apart, checksum, compared
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.transports.threads import ThreadTransport, run_ranks


def test_only_what_all_can_tell_is_compared() -> None:
    same, other, unknown, lacking = (("weights", name) for name in ("same", "other", "unknown", "lacking"))
    everyone: list[Values] = [{same: 1, other: 2, unknown: 3, lacking: 4}, {same: 1, other: 5, unknown: None}]
    assert apart(everyone, (4, 6)) == {other: [(2, [4]), (5, [6])], lacking: [(4, [4]), (NONE, [6])]}


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
        transport.allgather_object = lambda item: (gathered.append(1), gather(item))[1]  # type: ignore[method-assign]
        assert compared(lane, "optimizer.1", {("weights", "w"): value}) == {} and not gathered
        found = compared(lane, "optimizer.1", {("weights", "w"): transport.rank})
        assert found == {("weights", "w"): [(0, [0]), (1, [1])]} and gathered

    run_ranks(2, rank_main)


@pytest.mark.parametrize(("brought", "told"), [
    (({"a": 1}, {"a": 1}), []),
    (({"a": 1}, {"a": 2}), ["a"]),
    (({"a": 1, "b": 1}, {"a": 2}), ["a"]),  # the other's optimizer is no more
    (({"a": 1}, {}), []),
    (({}, {}), []),
])  # fmt: skip
def test_what_differs_when_all_leave(brought: Any, told: list[str]) -> None:
    """Ranks get all ranks' values of what each of them brings, where any differs."""
    heard: list[list[Any]] = [[], []]

    def rank_main(transport: ThreadTransport) -> None:
        lane = Lane(transport, Place(2, False))
        for name, value in brought[transport.rank].items():
            values = {("weights", "w"): value}
            lane.farewell.bring(name, values, lambda everyone, name=name: heard[transport.rank].append((name, everyone)))
        lane.leave()

    run_ranks(2, rank_main)
    expected = [(name, [{("weights", "w"): rank[name]} for rank in brought]) for name in told]
    assert heard == [expected, expected]


def test_a_rank_that_leaves_ends_what_others_wait_for() -> None:
    """Also where it brings something for a last look."""

    def rank_main(transport: ThreadTransport) -> None:
        lane = Lane(transport, Place(2, False))
        lane.farewell.bring("a", {("weights", "w"): transport.rank}, lambda everyone: None)
        if transport.rank == 0:
            with pytest.raises(ShutdownError):
                lane.run(Request(Signature("allreduce", "x"), lambda lane: None))
        lane.leave()

    run_ranks(2, rank_main)
