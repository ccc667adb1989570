"""Questions of Horovod scripts about the build: MPI, NCCL, versions."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hvdlite.api.build import check_num_rank_power_of_2, split_list
from hvdlite.common import exceptions, util
from hvdlite.runner.common.util import env


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
    monkeypatch.delenv("HVDLITE_TEST_C", raising=False)
    with util.env(HVDLITE_TEST_A=None, HVDLITE_TEST_B="2"):
        assert (os.environ["HVDLITE_TEST_A"], os.environ["HVDLITE_TEST_B"]) == ("1", "2")
        monkeypatch.setenv("HVDLITE_TEST_C", "set meanwhile")
    assert "HVDLITE_TEST_B" not in os.environ and os.environ["HVDLITE_TEST_C"] == "set meanwhile"
    with util.env(HVDLITE_TEST_A="2"):
        assert os.environ["HVDLITE_TEST_A"] == "2"
    assert os.environ["HVDLITE_TEST_A"] == "1"
    assert util.mpi_built(verbose=True) and not util.gloo_built()
    assert util.extension_available("json") and not util.extension_available("no_such_framework")
    assert not util.gpu_available("no_such_framework")
    assert util.is_iterable("ab") and not util.is_iterable(3)
    for version, target in (("2.10.0", "2.9.1"), ("2.4", "2.4.0"), ("2.12.0.post1", "2.12.0"), ("2.13.0+cpu", "2.13.0"),
                            ("2.14.0.dev20261101+cpu", "2.13.9"), ("2.12.0rc1", "2.12.0rc1")):  # fmt: skip
        assert util.is_version_greater_equal_than(version, target), version
    for version, target in (("1.9.9+cpu", "2.0.0"), ("2.12.0rc1", "2.12.0"), ("2.13.0a0+gitabc1234", "2.13.0"),
                            ("2.14.0.dev20261101", "2.14.0"), ("2.4", "2.4.1")):  # fmt: skip
        assert not util.is_version_greater_equal_than(version, target), version
    wrong: list[tuple[Any, str]] = [("2.1.0", "2.0"), ("2.1.0", "two"), (2.1, "2.0.0")]
    for version, target in wrong:
        with pytest.raises(ValueError, match="three numbers"):
            util.is_version_greater_equal_than(version, target)


def test_rank_and_size_as_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for names in env.TOLD for name in names):
        monkeypatch.delenv(name, raising=False)
    assert env.get_env_rank_and_size() == (0, 1)
    monkeypatch.setenv("PMI_RANK", "2")
    with pytest.raises(RuntimeError, match="PMI_RANK=2 and PMI_SIZE=None"):
        env.get_env_rank_and_size()
    monkeypatch.setenv("PMI_SIZE", "3")
    assert env.get_env_rank_and_size() == (2, 3)


def test_every_exception_of_horovods_module_has_its_name() -> None:
    mismatch = exceptions.HorovodVersionMismatchError("torch", "2.0.0", "2.1.0")
    assert isinstance(mismatch, ImportError) and (mismatch.name, mismatch.installed_version) == ("torch", "2.1.0")
    assert exceptions.HostsUpdatedInterrupt(True).skip_sync
