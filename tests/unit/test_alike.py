"""Comparisons of ranks: what differs, and what cannot be told."""

from __future__ import annotations

import numpy as np

from hvdlite.alike import NONE, Values, apart, checksum


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
