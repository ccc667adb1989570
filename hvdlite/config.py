"""All settings in one frozen object, the only reader of the user's environment.

`HVDLITE_X` wins over Horovod's `HOROVOD_X`. A value that cannot be read is an error that names the variable:
a setting that is silently ignored is worse than none.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

MB = 1024 * 1024
ALGORITHMS = ("auto", "ring", "halving_doubling", "doubling", "shared", "hierarchical", "native")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")
T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Settings of one run, read once by `init()`. Sizes in bytes, times in seconds."""

    algorithm: str = "auto"
    """One of ALGORITHMS; `HVDLITE_ALGORITHM`. `shared` and `hierarchical` are one: in memory within a host, over
    the network between hosts; `ring` instead where ranks share no memory."""
    bucket_bytes: int = 25 * MB
    """Gradients are sent in buckets of this size; `HVDLITE_BUCKET_MB`, `HOROVOD_FUSION_THRESHOLD` (bytes)."""
    bucket_bytes_given: bool = False
    """Whether the user said so. Else buckets that leave during backward are smaller, for they must fill early."""
    first_bucket_bytes: int = 1 * MB
    """The first bucket is small, so that communication starts early."""
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
        bucket = read(env, "HVDLITE_BUCKET_MB", lambda text: int(float(text) * MB))
        if bucket is None:
            bucket = read_either(env, "FUSION_THRESHOLD", int)
        given, bucket = bucket is not None, cls.bucket_bytes if bucket is None else max(bucket, 1)
        stall_check = read_either(env, "STALL_CHECK_TIME_SECONDS", seconds)
        stall_check = cls.stall_check if stall_check is None else stall_check
        stall_shutdown = read_either(env, "STALL_SHUTDOWN_TIME_SECONDS", seconds) or 0.0
        return cls(
            algorithm=read(env, "HVDLITE_ALGORITHM", one_of(*ALGORITHMS)) or cls.algorithm,
            bucket_bytes=bucket,
            bucket_bytes_given=given,
            first_bucket_bytes=min(cls.first_bucket_bytes, bucket),
            overlap=read(env, "HVDLITE_OVERLAP", one_of("auto", "0", "1")) or cls.overlap,
            timeline=read_either(env, "TIMELINE", str) or cls.timeline,
            timeline_mark_cycles=read_either(env, "TIMELINE_MARK_CYCLES", truth) or cls.timeline_mark_cycles,
            stall_check=0.0 if read_either(env, "STALL_CHECK_DISABLE", truth) else stall_check,
            stall_shutdown=stall_shutdown,
            shared_memory=read(env, "HVDLITE_SHARED_MEMORY", one_of("0", "1")) != "0",
            log_level=read_either(env, "LOG_LEVEL", one_of(*LOG_LEVELS)) or cls.log_level,
            log_hide_time=read_either(env, "LOG_HIDE_TIME", truth) or cls.log_hide_time,
            gpu_operations=read_either(env, "GPU_OPERATIONS", one_of("auto", "mpi", "nccl")) or cls.gpu_operations,
            cuda_aware=read(env, "HVDLITE_CUDA_AWARE", truth),
        )


NAMES = (
    "ALGORITHM", "BUCKET_MB", "CUDA_AWARE", "FUSION_THRESHOLD", "GPU_OPERATIONS", "LOG_HIDE_TIME", "LOG_LEVEL",
    "OVERLAP", "SHARED_MEMORY", "STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS", "STALL_SHUTDOWN_TIME_SECONDS",
    "TIMELINE", "TIMELINE_MARK_CYCLES",
)  # fmt: skip
"""All settings there are, behind HVDLITE_."""


def misspelt(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that look like settings and are none, and what was probably meant."""
    known = [f"HVDLITE_{name}" for name in NAMES]
    given = [name for name in (os.environ if env is None else env) if name.startswith("HVDLITE_") and name not in known]
    close = {name: get_close_matches(name, known, n=1, cutoff=0.8) for name in given}
    return {name: found[0] for name, found in close.items() if found}


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


def seconds(text: str) -> float:
    """A time of at least 0."""
    if not 0 <= float(text) < float("inf"):
        raise ValueError("must be a number of seconds, 0 or more")
    return float(text)


def truth(text: str) -> bool:
    """Horovod's switches: a whole number above 0 is on."""
    return int(text) > 0


def one_of(*choices: str) -> Callable[[str], str]:
    """A parser that accepts only these words."""

    def parse(text: str) -> str:
        if text.lower() not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text.lower()

    return parse


# A launcher that started this process announces the number of ranks in one of these.
OPEN_MPI = "Open MPI's mpirun"
ANNOUNCED_SIZE = {
    "OMPI_COMM_WORLD_SIZE": OPEN_MPI,
    "PMI_SIZE": "an MPICH-like mpiexec (Hydra) or Slurm's PMI",
    "MPI_LOCALNRANKS": "an MPICH-like mpiexec (Hydra)",
    "SLURM_STEP_NUM_TASKS": "Slurm's srun",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's launcher",
    "JSM_NAMESPACE_SIZE": "LSF's jsrun",
    "FLUX_JOB_SIZE": "Flux",
}
# Their presence alone says that a launcher is there.
LAUNCHED = ("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PALS_RANKID", "OMPI_COMM_WORLD_RANK", "ALPS_APP_PE")


@dataclass(frozen=True)
class Launched:
    """What a launcher says of itself in the environment: its name and the size it announces, if any."""

    by: str
    size: int | None


def launched(env: Mapping[str, str] | None = None) -> Launched | None:
    """Which launcher started this process; None when none did, so that the job is one of one process."""
    env = os.environ if env is None else env
    for name, launcher in ANNOUNCED_SIZE.items():
        if name == "SLURM_STEP_NUM_TASKS" and "SLURM_PROCID" not in env:
            continue
        if env.get(name, "").isdigit():
            return Launched(launcher, None if name == "MPI_LOCALNRANKS" else int(env[name]))
    if any(name in env for name in LAUNCHED):
        return Launched("an MPI launcher", None)
    return None


@dataclass(frozen=True)
class Job:
    """What `hvdliterun` tells a process of its job. folder: where ranks of this host find and leave files."""

    folder: str
    rank: int

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Job | None:
        """The job that this process belongs to; None where hvdliterun has not started it."""
        env = os.environ if env is None else env
        if "HVDLITE_JOB_RANK" not in env:
            return None
        return cls(env["HVDLITE_JOB_DIR"], int(env["HVDLITE_JOB_RANK"]))


DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def allow_dynamic_process_sets(word: str) -> None:
    """Horovod's `init(process_sets="dynamic")`: as if the variable had been set. Raises ValueError for other words."""
    if word.lower() != "dynamic":
        raise ValueError(f"init(process_sets=...) takes a list of hvd.ProcessSet objects or 'dynamic', not {word!r}")
    os.environ[DYNAMIC] = "1"


def dynamic_process_sets() -> bool:
    """Whether process sets may be added and removed."""
    return os.environ.get(DYNAMIC, "") not in ("", "0")


# What a launcher tells its processes, and a job started from one of them must not see.
LAUNCHERS_OWN = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_", "SLURM_", "FLUX_", "JSM_",
    "MV2_COMM_", "ALPS_",
)  # fmt: skip
USERS_OWN = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_MCA_")
NOT_USERS_OWN = (
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_", "OMPI_MCA_prte_", "PRTE_MCA_ess",
)  # fmt: skip
MPI_SETTINGS = ("OMPI_MCA_", "UCX_", "MPICH_", "MV2_", "FI_")


def is_launchers(name: str) -> bool:
    """Whether a launcher set this variable for one process of its job."""
    return name.startswith(NOT_USERS_OWN) or (name.startswith(LAUNCHERS_OWN) and not name.startswith(USERS_OWN))


IDENTITY = (
    "PMIX_NAMESPACE", "PMIX_RANK", "OMPI_MCA_ess_base_", "OMPI_COMM_WORLD_RANK", "PMI_", "HYDI_", "SLURM_", "PALS_",
    "JSM_", "FLUX_", "ALPS_", "MV2_COMM_",
)  # fmt: skip
RANKS_PROCESS = "HVDLITE_RANKS_PROCESS"
"""Set by `mark_rank` for the processes that a rank starts: its process number, and what its launcher told it."""


def mark_rank() -> None:
    """Let processes that this one starts know that what a launcher says in their environment was meant for this one."""
    os.environ[RANKS_PROCESS] = f"{os.getpid()} {told()}"


def rank_that_was_meant() -> int | None:
    """The number of the process that was started as a rank and passed its environment on to this one, which is none."""
    process, _, what = os.environ.get(RANKS_PROCESS, "").partition(" ")
    if not process or int(process) == os.getpid() or what != told() or has_open_launcher():
        return None
    return int(process)


def told() -> str:
    """By what a launcher tells its jobs and ranks apart. (Some of what it sets is changed when MPI is initialized.)"""
    told = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(IDENTITY))
    return blake2b("\n".join(told).encode(), digest_size=8).hexdigest()


def has_open_launcher() -> bool:
    """Whether the launcher has left a pipe open to this process: Hydra does, and tells jobs apart by little else."""
    try:
        os.fstat(int(os.environ["PMI_FD"]))
    except (KeyError, ValueError, OSError):
        return False
    return True


def mpi_settings() -> list[str]:
    """How the user has tuned the MPI: NAME=VALUE, sorted."""
    return sorted(f"{name}={value}" for name, value in os.environ.items()
                  if name.startswith(MPI_SETTINGS) and not is_launchers(name))  # fmt: skip


def offer_cores() -> None:
    """Before MPI is initialized: has Open MPI offer the core to others while it waits, unless the user says otherwise;
    MPICH does. Else who waits for a short message may keep the core from the thread that is to send it, for a
    scheduler's tick of 4 ms (measured: two ranks and their lanes on two cores). Where nobody wants it it takes 0.3 us.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")


def fresh_environment(packages: str) -> dict[str, str]:
    """This process' environment as if no launcher had started it, for a job of its own, which finds our code at
    `packages`."""
    kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    kept = {name: value for name, value in kept.items() if not name.startswith(("HVDLITE_", "HOROVOD_"))}
    if os.geteuid() == 0:  # so is the job that asks
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), packages)))}


def cache_folder() -> Path:
    """Where to keep what is costly to find out."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hvdlite"
