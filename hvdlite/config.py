"""All settings in one frozen object, the only reader of the user's environment.

`HVDLITE_X` wins over Horovod's `HOROVOD_X`. A value that cannot be read is an error that names the variable:
a setting that is silently ignored is worse than none.
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
    """Settings of one run, read once by `init()`. Sizes in bytes, times in seconds."""

    algorithm: str = "auto"
    """One of ALGORITHMS; `HVDLITE_ALGORITHM`. `shared` and `hierarchical` are one: in memory within a host, over
    the network between hosts; `ring` instead where ranks share no memory."""
    bucket_bytes: int | None = None
    """A bucket leaves once it holds so many bytes; `HVDLITE_BUCKET_MB`, `HOROVOD_FUSION_THRESHOLD` (bytes). None: see
    `planning`."""
    overlap: str = "auto"
    """`1`: buckets leave during backward; `0`: all at its end; `auto`: where it hides time. `HVDLITE_OVERLAP`."""
    shared_memory: bool = True
    """Whether ranks of one host may share memory, their GPUs too; `HVDLITE_SHARED_MEMORY=0` turns it off."""
    timeline: str = ""
    """Path of a trace file that rank 0 writes, or DYNAMIC, to allow `start_timeline()`; `HVDLITE_TIMELINE`."""
    timeline_mark_cycles: bool = False
    stall_check: float = 60.0
    """Waits this long are told of; 0: never. `HVDLITE_STALL_CHECK_TIME_SECONDS`, `HVDLITE_STALL_CHECK_DISABLE`."""
    stall_shutdown: float = 0.0
    """Waits this long end the job; 0: never. `HVDLITE_STALL_SHUTDOWN_TIME_SECONDS`."""
    log_level: str = ""
    """One of LOG_LEVELS; "" leaves Python's logging as it is. `HVDLITE_LOG_LEVEL`."""
    log_hide_time: bool = False
    """Whether log lines have no time; `HVDLITE_LOG_HIDE_TIME`."""
    gpu_operations: str = "auto"
    """What reduces arrays on GPUs: `auto` or `mpi`: `algorithm`, as on the host; `nccl`: NCCL.
    `HVDLITE_GPU_OPERATIONS`, `HOROVOD_GPU_OPERATIONS`."""
    cuda_aware: bool | None = None
    """Whether the MPI may be given device pointers; None: find out. `HVDLITE_CUDA_AWARE`."""
    replica_check: str = "error"
    """One of REPLICA_CHECKS: what happens where ranks begin to train different models. `HVDLITE_REPLICA_CHECK`."""

    @property
    def algorithm_on_gpu(self) -> str:
        """The algorithm for arrays on GPUs. Never native: an MPI's reductions of device memory crash."""
        if self.gpu_operations == "nccl":
            return "nccl"
        return "auto" if self.algorithm == "native" else self.algorithm

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Config:
        """Read the environment. Raises ValueError naming a variable whose value cannot be read."""
        env = os.environ if env is None else env
        bucket = read(env, "HVDLITE_BUCKET_MB", mebibytes)
        if bucket is None:
            bucket = read_either(env, "FUSION_THRESHOLD", whole)
        stall_check = read_either(env, "STALL_CHECK_TIME_SECONDS", seconds)
        read_either(env, DYNAMIC, truth)  # refused now if it cannot be read, and not when it is needed
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
"""All settings there are, behind HVDLITE_."""


def misspelt(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like settings and are none, and what was probably meant."""
    known = [f"HVDLITE_{name}" for name in NAMES]
    given = [name for name in (os.environ if env is None else env) if name.startswith("HVDLITE_") and name not in known]
    close = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in given}
    return {name: found[0] for name, found in close.items() if found}


def chose_allocator() -> bool:
    """Whether the user has chosen an allocator, or settings of glibc's."""
    return any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)


def read(env: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """The variable's value, parsed; None when unset or empty. Raises ValueError naming the variable."""
    text = env.get(name, "").strip()
    if not text:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"the environment variable {name} has the value {text!r}: {error}") from None


def read_either(env: Mapping[str, str], name: str, parse: Callable[[str], T]) -> T | None:
    """The value of HVDLITE_name, else of HOROVOD_name; None when neither is set."""
    value = read(env, f"HVDLITE_{name}", parse)
    return read(env, f"HOROVOD_{name}", parse) if value is None else value


def number(text: str, unit: str) -> float:
    """Of at least 0."""
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < float("inf"):
        raise ValueError(f"must be a number of {unit}, 0 or more")
    return found


def seconds(text: str) -> float:
    """A time."""
    return number(text, "seconds")


def mebibytes(text: str) -> int:
    """A size, in bytes."""
    return int(number(text, "MiB") * MB)


def whole(text: str) -> int:
    """A size given in bytes."""
    if not text.isdecimal():
        raise ValueError("must be a whole number of bytes, 0 or more")
    return int(text)


def truth(text: str) -> bool:
    """Horovod's switches: a whole number above 0 is on."""
    if not text.isdecimal():
        raise ValueError("must be 1 or 0")
    return int(text) > 0


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that accepts only these words."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text.lower()

    return parse


DYNAMIC = "DYNAMIC_PROCESS_SETS"


def allow_dynamic_process_sets() -> None:
    """Horovod's `init(process_sets="dynamic")`: as if its variable had been set, and ours had not."""
    os.environ.pop(f"HVDLITE_{DYNAMIC}", None)
    os.environ[f"HOROVOD_{DYNAMIC}"] = "1"


def dynamic_process_sets() -> bool:
    """Whether process sets may be added and removed now. Raises ValueError naming a variable that cannot be read."""
    return read_either(os.environ, DYNAMIC, truth) or False


def cache_folder() -> Path:
    """Where to keep what is costly to find out; for a user without a home, as in containers, where nothing can be."""
    home = os.path.expanduser("~")
    kept = os.devnull if home == "~" else os.path.join(home, ".cache")
    return Path(os.environ.get("XDG_CACHE_HOME") or kept) / "hvdlite"
