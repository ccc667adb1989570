"""All settings of a job, in one frozen object. The user's variables are read here and nowhere else.

HVDLITE_X wins over Horovod's HOROVOD_X. A value that cannot be read is a ValueError that names the variable. What
launchers set in the environment is read by `system.launcher_environment`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple, TypeVar

MB = 1024 * 1024
ALGORITHMS = ("auto", "ring", "halving_doubling", "doubling", "shared", "hierarchical", "native")
REPLICA_CHECKS = ("error", "warn", "off")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
DYNAMIC = "DYNAMIC"
"""A timeline with this path may be started later."""
T = TypeVar("T")


class StallLimits(NamedTuple):
    """Seconds that a rank may wait for others; 0: without a limit."""

    check: float = 60.0
    """After so many seconds a report is printed (`HVDLITE_STALL_CHECK_TIME_SECONDS`). With
    `HVDLITE_STALL_CHECK_DISABLE=1` there is none.
    """
    shutdown: float = 0.0
    """After so many seconds the job ends; 0: never. `HVDLITE_STALL_SHUTDOWN_TIME_SECONDS`."""


class TimelineFile(NamedTuple):
    """The trace file that rank 0 writes."""

    path: str = ""
    """The path of the file; `DYNAMIC` to allow `start_timeline()`; empty for no file. `HVDLITE_TIMELINE`."""
    mark_cycles: bool = False
    """Whether the trace marks where a lane turns to its next request. `HVDLITE_TIMELINE_MARK_CYCLES`."""

    @property
    def from_start(self) -> bool:
        """Whether the timeline begins with the job."""
        return self.path.upper() not in ("", DYNAMIC)


class LogStyle(NamedTuple):
    """How hvdlite's log lines look."""

    level: str = ""
    """One of LOG_LEVELS; empty leaves Python's logging as it is. `HVDLITE_LOG_LEVEL`."""
    hide_time: bool = False
    """Whether log lines have no time. `HVDLITE_LOG_HIDE_TIME`."""


@dataclass(frozen=True)
class Config:
    """Settings of one job, which `init()` reads once."""

    algorithm: str = "auto"
    """One of ALGORITHMS; `HVDLITE_ALGORITHM`. `shared` and `hierarchical` mean the same: shared memory within a host,
    the network between hosts, and `ring` where ranks share no memory.
    """
    bucket_bytes: int | None = None
    """The size at which a bucket of gradients leaves: `HVDLITE_BUCKET_MB` in MiB, or else
    `HVDLITE_FUSION_THRESHOLD` in bytes. None: `gradients.policy` chooses.
    """
    overlap: str = "auto"
    """`1`: buckets leave during backward; `0`: all leave at its end. `auto`: during backward on GPUs, and at its end on
    one host. Between hosts `auto` tries both in the first 29 steps, and keeps the faster way. `HVDLITE_OVERLAP`.
    """
    shared_memory: bool = True
    """Whether ranks of one host, and their GPUs, share memory; `HVDLITE_SHARED_MEMORY=0` turns it off."""
    timeline: TimelineFile = field(default_factory=TimelineFile)
    stall: StallLimits = field(default_factory=StallLimits)
    log: LogStyle = field(default_factory=LogStyle)
    gpu_operations: str = "auto"
    """How arrays on GPUs are reduced. `auto` and `mpi` use `algorithm`; `nccl` uses NCCL. `HVDLITE_GPU_OPERATIONS`,
    `HOROVOD_GPU_OPERATIONS`.
    """
    cuda_aware: bool | None = None
    """Whether the MPI takes pointers to GPU memory; None: hvdlite finds out. `HVDLITE_CUDA_AWARE`."""
    replica_check: str = "error"
    """One of REPLICA_CHECKS: the reaction if ranks train different models. With `off`, hvdlite never compares weights.
    The argument `replica_check=` of an optimizer or a tape wins. `HVDLITE_REPLICA_CHECK`.
    """
    compress_within_host: bool = False
    """Whether lossy compressors treat each rank as a host, for experiments. `HVDLITE_COMPRESS_WITHIN_HOST`.
    """
    summary: str = "0"
    """`1` or `color`: a summary is printed when the job ends. `HVDLITE_SUMMARY`, which `hvdliterun --summary` sets."""

    @property
    def algorithm_on_gpu(self) -> str:
        """The algorithm for arrays on GPUs. Never `native`: MPI's own reductions of device memory crash."""
        if self.gpu_operations == "nccl":
            return "nccl"
        return "auto" if self.algorithm == "native" else self.algorithm

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """The settings that the environment has.

        Args:
            env: The variables to read; None for this process' own.

        Raises:
            ValueError: A variable has a value that cannot be read. The message names it.
        """
        env = os.environ if env is None else env
        bucket = read(env, "HVDLITE_BUCKET_MB", mebibytes)
        if bucket is None:
            bucket = read_either(env, "FUSION_THRESHOLD", whole)
        read_either(env, DYNAMIC_PROCESS_SETS, truth)  # a bad value fails here, not when it is needed
        return cls(
            algorithm=read(env, "HVDLITE_ALGORITHM", one_of(*ALGORITHMS)) or cls.algorithm,
            bucket_bytes=None if bucket is None else max(bucket, 1),
            overlap=read(env, "HVDLITE_OVERLAP", one_of("auto", "0", "1")) or cls.overlap,
            shared_memory=read(env, "HVDLITE_SHARED_MEMORY", one_of("0", "1")) != "0",
            timeline=TimelineFile(
                read_either(env, "TIMELINE", str) or "", read_either(env, "TIMELINE_MARK_CYCLES", truth) or False
            ),
            stall=stall_limits(env),
            log=LogStyle(
                read_either(env, "LOG_LEVEL", one_of(*LOG_LEVELS)) or "",
                read_either(env, "LOG_HIDE_TIME", truth) or False,
            ),
            gpu_operations=read_either(env, "GPU_OPERATIONS", one_of("auto", "mpi", "nccl")) or cls.gpu_operations,
            cuda_aware=read(env, "HVDLITE_CUDA_AWARE", truth),
            replica_check=read_either(env, "REPLICA_CHECK", one_of(*REPLICA_CHECKS)) or cls.replica_check,
            compress_within_host=read(env, "HVDLITE_COMPRESS_WITHIN_HOST", truth) or False,
            summary=read(env, "HVDLITE_SUMMARY", one_of("0", "1", "color")) or cls.summary,
        )


def stall_limits(env: Mapping[str, str]) -> StallLimits:
    """The limits that the environment sets.

    Raises:
        ValueError: A variable has a value that cannot be read.
    """
    check = read_either(env, "STALL_CHECK_TIME_SECONDS", seconds)
    if read_either(env, "STALL_CHECK_DISABLE", truth):
        check = 0.0
    shutdown = read_either(env, "STALL_SHUTDOWN_TIME_SECONDS", seconds)
    return StallLimits(StallLimits().check if check is None else check, shutdown or 0.0)


NAMES = (
    "ALGORITHM", "AS_MPI", "BUCKET_MB", "COMPRESS_WITHIN_HOST", "CUDA_AWARE", "DYNAMIC_PROCESS_SETS",
    "FUSION_THRESHOLD", "GPU_OPERATIONS", "LOG_HIDE_TIME", "LOG_LEVEL", "MPIEXEC", "OVERLAP", "REPLICA_CHECK",
    "SHARED_MEMORY", "STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "SUMMARY",
    "TIMELINE", "TIMELINE_MARK_CYCLES",
)  # fmt: skip
"""The names of all settings, without the prefix HVDLITE_."""
READ_ELSEWHERE = {
    "AS_MPI": "`1`: torch's backend `mpi` means hvdlite, for libraries that choose the backend themselves.",
    "DYNAMIC_PROCESS_SETS": (
        '`1`: process sets may be added and removed after `init()`, as with `init(process_sets="dynamic")`.'
    ),
    "MPIEXEC": "The MPI's launcher that `hvdliterun` starts. If it is unset, `hvdliterun` searches for one.",
}
"""The meanings of settings that are no fields of `Config`, by their names in NAMES."""


def misspelt(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables with a name similar to a setting's, and for each the setting that was probably meant.

    Args:
        env: The variables to read; None for this process' own.
    """
    known = [f"HVDLITE_{name}" for name in NAMES]
    given = [name for name in (os.environ if env is None else env) if name.startswith("HVDLITE_") and name not in known]
    close = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in given}
    return {name: found[0] for name, found in close.items() if found}


def chose_allocator() -> bool:
    """Whether the user has chosen another allocator, or settings of glibc's."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def read(env: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """The variable's parsed value; None if it is unset or empty.

    Raises:
        ValueError: The value cannot be parsed. The message names the variable.
    """
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"the environment variable {name} has the value {text!r}: {error}") from None


def read_either(env: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """The value of HVDLITE_name, else of HOROVOD_name; None if neither is set."""
    value = read(env, f"HVDLITE_{name}", parse)
    return read(env, f"HOROVOD_{name}", parse) if value is None else value


def number(text: str, unit: str) -> float:
    """A finite number of at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"must be a number of {unit}, 0 or more")
    return found


def seconds(text: str) -> float:
    """A time in seconds."""
    return number(text, "seconds")


def mebibytes(text: str) -> int:
    """A size in MiB, converted to bytes."""
    return int(number(text, "MiB") * MB)


def whole(text: str) -> int:
    """A size in bytes."""
    if not text.isdecimal():
        raise ValueError("must be a whole number of bytes, 0 or more")
    return int(text)


def truth(text: str) -> bool:
    """A switch, as Horovod reads it: a whole number above 0 is on."""
    if not text.isdecimal():
        raise ValueError("must be 1 or 0")
    return int(text) > 0


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that accepts these words only, in any case."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text.lower()

    return parse


DYNAMIC_PROCESS_SETS = "DYNAMIC_PROCESS_SETS"


def dynamic_process_sets() -> bool:
    """Whether the environment allows now that process sets are added and removed.

    Raises:
        ValueError: The variable has a value that cannot be read.
    """
    return read_either(os.environ, DYNAMIC_PROCESS_SETS, truth) or False


def cache_folder() -> Path:
    """The folder for results that take long to find. A user without a home, as in containers, gets an unusable path."""
    home = os.path.expanduser("~")
    kept = os.devnull if home == "~" else os.path.join(home, ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or kept) / "hvdlite"
