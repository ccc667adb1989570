"""All settings in one frozen object. Only this module and `system/launcher_environment` read the environment.

`HVDLITE_X` wins over Horovod's `HOROVOD_X`. A value that cannot be read is an error that names the variable.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

MB = 1024 * 1024
ALGORITHMS = ("auto", "ring", "halving_doubling", "doubling", "shared", "hierarchical", "native")
REPLICA_CHECKS = ("error", "warn", "off")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Settings of one run, read once by `init()`. Sizes are in bytes, times in seconds."""

    algorithm: str = "auto"
    """One of ALGORITHMS; `HVDLITE_ALGORITHM`. `shared` and `hierarchical` mean the same: shared memory within a host,
    the network between hosts, and `ring` where ranks share no memory.
    """
    bucket_bytes: int | None = None
    """A bucket leaves once it holds this many bytes; None: `gradients.policy` chooses. `HVDLITE_BUCKET_MB`,
    `HOROVOD_FUSION_THRESHOLD` (bytes).
    """
    overlap: str = "auto"
    """`1`: buckets leave during backward; `0`: all leave at its end; `auto`: try both. `HVDLITE_OVERLAP`."""
    shared_memory: bool = True
    """Whether ranks of one host, and their GPUs, share memory; `HVDLITE_SHARED_MEMORY=0` turns it off."""
    timeline: str = ""
    """Path of the trace file that rank 0 writes, or DYNAMIC to allow `start_timeline()`; `HVDLITE_TIMELINE`."""
    timeline_mark_cycles: bool = False
    stall_check: float = 60.0
    """Log waits of this length; 0: never. `HVDLITE_STALL_CHECK_TIME_SECONDS`, `HVDLITE_STALL_CHECK_DISABLE`."""
    stall_shutdown: float = 0.0
    """End the job after a wait of this length; 0: never. `HVDLITE_STALL_SHUTDOWN_TIME_SECONDS`."""
    log_level: str = ""
    """One of LOG_LEVELS; "" leaves Python's logging as it is. `HVDLITE_LOG_LEVEL`."""
    log_hide_time: bool = False
    """Leave the time out of log lines; `HVDLITE_LOG_HIDE_TIME`."""
    gpu_operations: str = "auto"
    """How arrays on GPUs are reduced: `auto` and `mpi` use `algorithm`, `nccl` uses NCCL. `HVDLITE_GPU_OPERATIONS`,
    `HOROVOD_GPU_OPERATIONS`.
    """
    cuda_aware: bool | None = None
    """Whether the MPI takes device pointers; None: find out. `HVDLITE_CUDA_AWARE`."""
    replica_check: str = "error"
    """One of REPLICA_CHECKS: what happens if ranks begin to train different models. `HVDLITE_REPLICA_CHECK`."""

    @property
    def algorithm_on_gpu(self) -> str:
        """The algorithm for arrays on GPUs. Never `native`: MPI's own reductions of device memory crash."""
        if self.gpu_operations == "nccl":
            return "nccl"
        return "auto" if self.algorithm == "native" else self.algorithm

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read the environment.

        Raises:
            ValueError: A variable has a value that cannot be read. The message names it.
        """
        env = os.environ if env is None else env
        bucket = read(env, "HVDLITE_BUCKET_MB", mebibytes)
        if bucket is None:
            bucket = read_either(env, "FUSION_THRESHOLD", whole)
        stall_check = read_either(env, "STALL_CHECK_TIME_SECONDS", seconds)
        read_either(env, DYNAMIC, truth)  # a bad value fails here, not when it is needed
        stall_check = cls.stall_check if stall_check is None else stall_check
        return cls(
            algorithm=read(env, "HVDLITE_ALGORITHM", one_of(*ALGORITHMS)) or cls.algorithm,
            bucket_bytes=None if bucket is None else max(bucket, 1),
            overlap=read(env, "HVDLITE_OVERLAP", one_of("auto", "0", "1")) or cls.overlap,
            timeline=read_either(env, "TIMELINE", str) or cls.timeline,
            timeline_mark_cycles=read_either(env, "TIMELINE_MARK_CYCLES", truth) or cls.timeline_mark_cycles,
            stall_check=0.0 if read_either(env, "STALL_CHECK_DISABLE", truth) else stall_check,
            stall_shutdown=read_either(env, "STALL_SHUTDOWN_TIME_SECONDS", seconds) or cls.stall_shutdown,
            shared_memory=read(env, "HVDLITE_SHARED_MEMORY", one_of("0", "1")) != "0",
            log_level=read_either(env, "LOG_LEVEL", one_of(*LOG_LEVELS)) or cls.log_level,
            log_hide_time=read_either(env, "LOG_HIDE_TIME", truth) or cls.log_hide_time,
            gpu_operations=read_either(env, "GPU_OPERATIONS", one_of("auto", "mpi", "nccl")) or cls.gpu_operations,
            cuda_aware=read(env, "HVDLITE_CUDA_AWARE", truth),
            replica_check=read_either(env, "REPLICA_CHECK", one_of(*REPLICA_CHECKS)) or cls.replica_check,
        )


NAMES = (
    "ALGORITHM", "BUCKET_MB", "CUDA_AWARE", "DYNAMIC_PROCESS_SETS", "FUSION_THRESHOLD", "GPU_OPERATIONS",
    "LOG_HIDE_TIME", "LOG_LEVEL", "MPIEXEC", "OVERLAP", "REPLICA_CHECK", "SHARED_MEMORY", "STALL_CHECK_DISABLE",
    "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS", "TIMELINE", "TIMELINE_MARK_CYCLES",
)  # fmt: skip
"""All settings, without the prefix HVDLITE_."""


def misspelt(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like settings but are none, each with the setting that was probably meant."""
    known = [f"HVDLITE_{name}" for name in NAMES]
    given = [name for name in (os.environ if env is None else env) if name.startswith("HVDLITE_") and name not in known]
    close = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in given}
    return {name: found[0] for name, found in close.items() if found}


def chose_allocator() -> bool:
    """Whether the user has chosen an allocator or settings of glibc's."""
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


DYNAMIC = "DYNAMIC_PROCESS_SETS"


def allow_dynamic_process_sets() -> None:
    """Horovod's `init(process_sets="dynamic")`: set Horovod's variable and unset ours."""
    os.environ.pop(f"HVDLITE_{DYNAMIC}", None)
    os.environ[f"HOROVOD_{DYNAMIC}"] = "1"


def dynamic_process_sets() -> bool:
    """Whether process sets may be added and removed now.

    Raises:
        ValueError: The variable cannot be read.
    """
    return read_either(os.environ, DYNAMIC, truth) or False


def cache_folder() -> Path:
    """The folder for answers that are costly to find. Nothing can be kept for a user without a home, as in containers.
    """
    home = os.path.expanduser("~")
    kept = os.devnull if home == "~" else os.path.join(home, ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or kept) / "hvdlite"
