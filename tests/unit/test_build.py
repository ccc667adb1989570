"""What Horovod scripts ask beside communicating."""

from __future__ import annotations

import os

import pytest

from hvdlite.build import check_num_rank_power_of_2, split_list
from hvdlite.common import exceptions, util


def test_powers_of_two() -> None:
    assert [number for number in range(-2, 20) if check_num_rank_power_of_2(number)] == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 10])
def test_lists_are_split_evenly_the_first_parts_longer(count: int) -> None:
    parts = split_list(list(range(10)), count)
    assert [item for part in parts for item in part] == list(range(10))
    lengths = [len(part) for part in parts]
    assert len(lengths) == count and max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


def test_helpers_of_horovods_common_util(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_TEST_A", "1")
    with util.env(HVDLITE_TEST_A=None, HVDLITE_TEST_B="2"):
        assert (os.environ["HVDLITE_TEST_A"], os.environ["HVDLITE_TEST_B"]) == ("1", "2")
    assert "HVDLITE_TEST_B" not in os.environ
    assert util.mpi_built(verbose=True) and not util.gloo_built()
    assert util.extension_available("json") and not util.extension_available("no_such_framework")
    assert not util.gpu_available("no_such_framework")
    assert util.is_iterable("ab") and not util.is_iterable(3)
    assert util.is_version_greater_equal_than("2.10.0", "2.9.1")
    assert not util.is_version_greater_equal_than("1.9.9+cpu", "2.0.0")
    with pytest.raises(ValueError, match="three numbers"):
        util.is_version_greater_equal_than("2.1", "2.0.0")


def test_every_exception_of_horovods_module_has_its_name() -> None:
    mismatch = exceptions.HorovodVersionMismatchError("torch", "2.0.0", "2.1.0")
    assert isinstance(mismatch, ImportError) and (mismatch.name, mismatch.installed_version) == ("torch", "2.1.0")
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync
