"""Who started this process: what a launcher says in the environment, or a rank that passed that on; and how the MPI is
tuned there.

Only the presence of a launcher and its words for telling ranks apart are read here, never who is where (`topology`
learns that from MPI).
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from hashlib import blake2b

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


def launcher(env: Mapping[str, str] | None = None) -> Launched | None:
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


# What a launcher tells its processes, and a job started from one of them must not see.
LAUNCHERS_OWN = (
    "OMPI_", "PMIX_", "PMI_", "PRTE_", "PALS_", "HYDRA_", "HYDI_", "MPI_LOCAL", "MPIR_", "SLURM_", "FLUX_", "JSM_",
    "MV2_COMM_", "ALPS_", "I_MPI_INFO_", "I_MPI_HYDRA_UUID", "I_MPI_HYDRA_TOPOLIB", "I_MPI_INTERNAL_", "I_MPI_PIN_INFO",
    "I_MPI_PIN_MAPPING", "I_MPI_RETURN_WIN_", "I_MPI_BIND_WIN_",
)  # fmt: skip
USERS_OWN = ("OMPI_MCA_", "OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT", "PRTE_MCA_")
NOT_USERS_OWN = (
    "OMPI_MCA_orte_", "OMPI_MCA_ess", "OMPI_MCA_pmix", "OMPI_MCA_initial_", "OMPI_MCA_prte_", "PRTE_MCA_ess",
)  # fmt: skip
MPI_SETTINGS = ("OMPI_MCA_", "UCX_", "MPICH_", "MV2_", "I_MPI_", "FI_")


def is_launchers(name: str) -> bool:
    """Whether a launcher set this variable for one process of its job."""
    return name.startswith(NOT_USERS_OWN) or (name.startswith(LAUNCHERS_OWN) and not name.startswith(USERS_OWN))


IDENTITY = (
    "PMIX_NAMESPACE", "PMIX_RANK", "OMPI_MCA_ess_base_", "OMPI_COMM_WORLD_RANK", "PMI_", "HYDI_", "I_MPI_HYDRA_UUID",
    "SLURM_", "PALS_", "JSM_", "FLUX_", "ALPS_", "MV2_COMM_",
)  # fmt: skip
RANKS_PROCESS = "HVDLITE_RANKS_PROCESS"
"""Set by `mark_rank` for the processes that a rank starts: its process number, and what its launcher told it."""


def mark_rank() -> None:
    """Let processes that this one starts know that what a launcher says in their environment was meant for this one."""
    os.environ[RANKS_PROCESS] = f"{os.getpid()} {told()}"


def rank_that_was_meant() -> int | None:
    """The number of the process that was started as a rank and passed its environment on to this one, which is none."""
    process, _, what = os.environ.get(RANKS_PROCESS, "").partition(" ")
    if not process or int(process) == os.getpid() or what != told() or launchers_pipe_is_open():
        return None
    return int(process)


@dataclass(frozen=True)
class Parent:
    """What a rank passed on to the processes that it started: where it is in its job. Named as in `Topology`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


RANKS_PLACE = "HVDLITE_RANKS_PLACE"
"""Set by `mark_place` from hvd.init() to hvd.shutdown(): as RANKS_PROCESS, and behind it what Parent has, in order."""


def mark_place(parent: Parent | None) -> None:
    """Tell processes that this one starts from now on what its place is; None: it has none any more.

    The environment is all that a child has from a parent that does not know of it (multiprocessing with spawn or
    forkserver, subprocess). A forkserver keeps the environment that it was started with.
    """
    if parent is None:
        os.environ.pop(RANKS_PLACE, None)
    else:
        numbers = " ".join(str(int(value)) for value in astuple(parent))
        os.environ[RANKS_PLACE] = f"{os.getpid()} {told()} {numbers}"


def parent() -> Parent | None:
    """The place of the rank that this process, which is none, descends from; None where there is none."""
    process, what, *numbers = os.environ.get(RANKS_PLACE, "- -").split()
    if process in ("-", str(os.getpid())) or what != told() or launchers_pipe_is_open():
        return None
    rank, size, local_rank, local_size, cross_rank, cross_size, homogeneous = map(int, numbers)
    return Parent(rank, size, local_rank, local_size, cross_rank, cross_size, bool(homogeneous))


def told() -> str:
    """By what a launcher tells its jobs and ranks apart. (Some of what it sets is changed when MPI is initialized.)"""
    told = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(IDENTITY))
    return blake2b(os.fsencode("\n".join(told)), digest_size=8).hexdigest()


def launchers_pipe_is_open() -> bool | None:
    """Whether the launcher's pipe has come to this process (subprocess closes it), and its other end is open (not after
    an earlier program of this rank has ended MPI); None where there is none. Hydra tells jobs apart by little else."""
    if not os.environ.get("PMI_FD", "").isdigit():
        return None
    pipe = select.poll()
    pipe.register(int(os.environ["PMI_FD"]), select.POLLIN)
    return not any(event & (select.POLLHUP | select.POLLNVAL) for _, event in pipe.poll(0))


def mpi_settings() -> list[str]:
    """How the user has tuned the MPI: NAME=VALUE, sorted."""
    return sorted(f"{name}={value}" for name, value in os.environ.items()
                  if name.startswith(MPI_SETTINGS) and not is_launchers(name))  # fmt: skip


def offer_cores() -> None:
    """Before MPI is initialized: has Open MPI and Intel MPI offer the core to others while they wait, unless the user
    says otherwise; MPICH does. Else who waits for a short message may keep the core from the thread that is to send it,
    for a scheduler's tick of 4 ms (measured: two ranks and their lanes on two cores). Where nobody wants it it takes
    0.3 us.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("I_MPI_THREAD_YIELD", "2")


@contextmanager
def alone() -> Iterator[None]:
    """Around MPI's initialization in a process that no launcher has started: Open MPI 5 would leave shared memory
    behind, of which it needs none."""
    name = "OMPI_MCA_btl"
    if name in os.environ:
        yield
        return
    os.environ[name] = "self"
    try:
        yield
    finally:
        del os.environ[name]


def fresh_environment(packages: str) -> dict[str, str]:
    """This process' environment as if no launcher had started it, for a job of its own, which finds our code at
    `packages`."""
    kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    job = os.environ.get("HVDLITE_JOB_ID")  # whose folders are not the next one's
    kept = {name: value for name, value in kept.items()
            if not name.startswith(("HVDLITE_", "HOROVOD_")) and not (job and job in value)}  # fmt: skip
    if os.geteuid() == 0:  # so is the job that asks
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), packages)))}
