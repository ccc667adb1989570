"""Comparisons of ranks: what differs, and what cannot be told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place
from hvdlite.alike import NONE, Values, apart, checksum, compared
from hvdlite.engine import Lane
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
