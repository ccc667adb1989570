"""What Horovod scripts ask beside communicating."""

from __future__ import annotations

import pytest

from hvdlite.build import check_num_rank_power_of_2, split_list


def test_powers_of_two() -> None:
    assert [number for number in range(-2, 20) if check_num_rank_power_of_2(number)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_lists_are_split_evenly_the_first_parts_longer(count: int) -> None:
    parts = split_list(list(range(10)), count)
    assert [item for part in parts for item in part] == list(range(10))
    lengths = [len(part) for part in parts]
    assert len(lengths) == count and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)
