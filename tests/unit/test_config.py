"""Settings from the environment: hvdlite's names win over Horovod's, and an invalid value is an error with its name."""

from __future__ import annotations

import dataclasses
import os

import pytest

from hvdlite.config import (
    ALGORITHMS,
    DYNAMIC_PROCESS_SETS,
    MB,
    NAMES,
    Config,
    StallLimits,
    cache_folder,
    dynamic_process_sets,
    misspelt,
)
from hvdlite.errors import HvdliteError
from hvdlite.job.runtime import agree_on
from hvdlite.system.launcher_environment import launcher
from hvdlite.transports.threads import run_ranks


def test_defaults() -> None:
    made = Config.from_env({})
    assert made == Config() and made.bucket_bytes is None and made.algorithm == "auto" and made.shared_memory
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.algorithm = "ring"  # type: ignore[misc]


@pytest.mark.parametrize(("env", "nbytes"), [
    ({"HVDLITE_BUCKET_MB": "4"}, 4 * MB),
    ({"HVDLITE_BUCKET_MB": "0.5"}, MB // 2),
    ({"HOROVOD_FUSION_THRESHOLD": "1000000"}, 1_000_000),
    ({"HVDLITE_FUSION_THRESHOLD": "5", "HOROVOD_FUSION_THRESHOLD": "7"}, 5),
    ({"HVDLITE_BUCKET_MB": "1", "HOROVOD_FUSION_THRESHOLD": "7"}, MB),
    ({"HOROVOD_FUSION_THRESHOLD": "0"}, 1),  # in Horovod: no fusion
    ({"HVDLITE_BUCKET_MB": "", "HOROVOD_FUSION_THRESHOLD": " 9 "}, 9),
])  # fmt: skip
def test_bucket_size(env: dict[str, str], nbytes: int) -> None:
    made = Config.from_env(env)
    assert made.bucket_bytes == nbytes


def test_ranks_that_were_told_different_sizes() -> None:
    """If the user sets 25 MiB, that differs from the default of 25 MiB, which the plan may make smaller."""
    sizes = (25 * MB, None)
    with pytest.raises(
        HvdliteError, match=r"HVDLITE_BUCKET_MB \(bytes\) differs: rank 0 has 26214400, rank 1 has None"
    ):
        run_ranks(2, lambda world: agree_on(world, Config(bucket_bytes=sizes[world.rank])))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms(name: str) -> None:
    assert Config.from_env({"HVDLITE_ALGORITHM": name.upper()}).algorithm == name


def test_replica_check() -> None:
    assert Config.from_env({}).replica_check == "error"
    for name in ("HVDLITE_REPLICA_CHECK", "HOROVOD_REPLICA_CHECK"):
        assert Config.from_env({name: "Warn"}).replica_check == "warn"
    said = ("error", "off")
    with pytest.raises(HvdliteError, match="HVDLITE_REPLICA_CHECK differs: rank 0 has error, rank 1 has off"):
        run_ranks(2, lambda world: agree_on(world, Config(replica_check=said[world.rank])))


def test_what_reduces_on_gpus() -> None:
    """An MPI's own reductions are never used on device memory, where they crash."""
    assert Config.from_env({"HVDLITE_ALGORITHM": "native"}).algorithm_on_gpu == "auto"
    assert Config.from_env({"HVDLITE_ALGORITHM": "ring"}).algorithm_on_gpu == "ring"
    assert Config.from_env({"HVDLITE_ALGORITHM": "ring", "HOROVOD_GPU_OPERATIONS": "NCCL"}).algorithm_on_gpu == "nccl"


@pytest.mark.parametrize(("name", "value"), [
    ("HVDLITE_ALGORITHM", "fastest"), ("HVDLITE_BUCKET_MB", "big"), ("HOROVOD_FUSION_THRESHOLD", "1e6"),
    ("HVDLITE_OVERLAP", "yes"), ("HVDLITE_SHARED_MEMORY", "2"), ("HVDLITE_BUCKET_MB", "inf"), ("HVDLITE_BUCKET_MB", "-1"),
    ("HOROVOD_STALL_CHECK_DISABLE", "true"), ("HVDLITE_STALL_CHECK_TIME_SECONDS", "soon"),
    ("HVDLITE_REPLICA_CHECK", "loud"),
])  # fmt: skip
def test_what_cannot_be_read_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has the value '{value}': must be "):
        Config.from_env({name: value})


def test_all_settings_are_known_by_name() -> None:
    asked: set[str] = set()

    class Recorder(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            asked.add(name)
            return default

    Config.from_env(Recorder())
    asked.update(("HVDLITE_MPIEXEC", "HVDLITE_AS_MPI", "HVDLITE_SUMMARY"))  # read by others than Config
    assert {name for name in asked if name.startswith("HVDLITE_")} == {f"HVDLITE_{name}" for name in NAMES}


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may have neither HOME nor a user name."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(OSError):
        cache_folder().mkdir(parents=True)


def test_dynamic_process_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvdlite's variable wins over Horovod's."""
    ours, horovods = f"HVDLITE_{DYNAMIC_PROCESS_SETS}", f"HOROVOD_{DYNAMIC_PROCESS_SETS}"
    for name in (ours, horovods):
        monkeypatch.setenv(name, "")  # so that both are restored
    assert not dynamic_process_sets()
    monkeypatch.setenv(horovods, "1")
    assert dynamic_process_sets()
    monkeypatch.setenv(ours, "0")
    assert not dynamic_process_sets()
    monkeypatch.setenv(ours, "false")
    with pytest.raises(ValueError, match=f"{ours} has the value 'false': must be 1 or 0"):
        dynamic_process_sets()


def test_misspelt_settings() -> None:
    env = {
        "HVDLITE_ALGORITM": "ring",
        "HVDLITE_BUCKETS_MB": "1",
        "HVDLITE_JOB_ID": "x",
        "HVDLITE_JOB_TERMINAL": "1",
        "HVDLITE_LAUNCHED": "1.0",
        "HVDLITE_OVERLAP": "1",
        "A": "b",
    }
    assert misspelt(env) == {"HVDLITE_ALGORITM": "HVDLITE_ALGORITHM", "HVDLITE_BUCKETS_MB": "HVDLITE_BUCKET_MB"}


def test_switches() -> None:
    made = Config.from_env({"HVDLITE_SHARED_MEMORY": "0", "HVDLITE_OVERLAP": "1"})
    assert (made.shared_memory, made.overlap) == (False, "1")


@pytest.mark.parametrize(("env", "size"), [
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"}, 4),
    ({"PMI_SIZE": "2", "PMI_RANK": "0"}, 2),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, 8),
    ({"MPI_LOCALNRANKS": "2"}, None),
    ({"PMIX_RANK": "0"}, None),
])  # fmt: skip
def test_launchers_are_seen(env: dict[str, str], size: int | None) -> None:
    found = launcher(env)
    assert found is not None and found.size == size


def test_no_launcher() -> None:
    """The shell of a Slurm allocation is no launcher: only a step has a process id."""
    assert launcher({}) is None
    assert launcher({"SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "1", "HOME": "/"}) is None


@pytest.mark.parametrize(("env", "check", "shutdown"), [
    ({}, 60, 0),
    ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10.5"}, 5, 10.5),
    ({"HVDLITE_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, 5, 0),
    ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, 0, 0),
    ({"HVDLITE_STALL_CHECK_DISABLE": "0"}, 60, 0),
    ({"HVDLITE_STALL_CHECK_DISABLE": "0", "HOROVOD_STALL_CHECK_DISABLE": "1"}, 60, 0),
])  # fmt: skip
def test_stall_limits(env: dict[str, str], check: float, shutdown: float) -> None:
    made = Config.from_env(env)
    assert made.stall == StallLimits(check, shutdown)


@pytest.mark.parametrize(("name", "value"), [
    ("HOROVOD_STALL_CHECK_TIME_SECONDS", "-1"), ("HVDLITE_STALL_SHUTDOWN_TIME_SECONDS", "soon"),
    ("HVDLITE_STALL_CHECK_TIME_SECONDS", "inf"), ("HOROVOD_STALL_CHECK_DISABLE", "yes"),
])  # fmt: skip
def test_stall_limits_that_cannot_be_read(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Config.from_env({name: value})
