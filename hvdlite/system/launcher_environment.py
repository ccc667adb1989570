"""What the environment says about the launcher of this process, about the rank that started it, and about the MPI.

Apart from `config`, `check` and Horovod's module names, no other module uses the environment. `config` reads the user's
settings. `job.topology` learns from MPI, not from here, which rank runs on which host. This module writes defaults for
the MPI before MPI starts. It also writes HVDLITE_RANKS_PROCESS and HVDLITE_RANKS_PLACE: a child process has no other
way to learn that its parent is a rank. `fresh_environment` prepares the environment of a new job.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from hashlib import blake2b

AT_IMPORT = frozenset(os.environ)
"""The variables that were set when hvdlite was imported. A script may clear its environment afterwards."""
JOB_FOLDER = os.environ.get("HVDLITE_JOB_DIR")
"""The job's folder on this host, which hvdliterun has made; None without hvdliterun."""
JOB_RANK = os.environ.get("HVDLITE_JOB_RANK")
"""This process' rank in MPI.COMM_WORLD, according to hvdliterun; None without hvdliterun."""
STARTED = os.environ.get("HVDLITE_LAUNCHED", "")
"""When hvdliterun began, in seconds since the epoch."""
SEVERAL_HOSTS = "HVDLITE_JOB_HOSTS" in AT_IMPORT
"""Whether hvdliterun has started ranks on more than one host."""
UNDER_HYDRA_OR_PMI = not AT_IMPORT.isdisjoint(("HYDI_CONTROL_FD", "PMI_FD"))
"""Whether MPICH's Hydra, or Slurm by PMI-2, has started this process."""
UNDER_PRRTE = "PRTE_LAUNCHED" in AT_IMPORT
"""Whether the mpirun of Open MPI 5 or later has started this process."""

# A launcher that started this process announces the number of ranks in one of these variables.
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
# If one of these variables is set, a launcher has started this process.
LAUNCHED = ("PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "PALS_RANKID", "OMPI_COMM_WORLD_RANK", "ALPS_APP_PE")


def launched_at() -> float:
    """When hvdliterun began, in seconds since the epoch; 0.0 without hvdliterun."""
    try:
        return float(STARTED)
    except ValueError:
        return 0.0


@dataclass(frozen=True)
class Launched:
    """What a launcher says about itself in the environment.

    Attributes:
        by: The launcher's name in messages.
        size: The number of ranks that it announces; None if it announces none.
    """

    by: str
    size: int | None


def launcher(env: Mapping[str, str] | None = None) -> Launched | None:
    """The launcher that started this process; None if there is none, and the job has one process.

    Args:
        env: The environment to read; None for this process' own.
    """
    env = os.environ if env is None else env
    for name, launcher in ANNOUNCED_SIZE.items():
        if name == "SLURM_STEP_NUM_TASKS" and "SLURM_PROCID" not in env:
            continue
        if env.get(name, "").isdigit():
            return Launched(launcher, None if name == "MPI_LOCALNRANKS" else int(env[name]))
    if any(name in env for name in LAUNCHED):
        return Launched("an MPI launcher", None)
    return None


ANNOUNCED_RANK = (
    "HVDLITE_JOB_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID",
    "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK",
)  # fmt: skip


def announced_rank(env: Mapping[str, str] | None = None) -> int | None:
    """This process' rank among all that the launcher started, as it announces it; None if it announces none.

    Args:
        env: The environment to read; None for this process' own.
    """
    env = os.environ if env is None else env
    names = [*ANNOUNCED_RANK, *(["SLURM_PROCID"] if "SLURM_STEP_NUM_TASKS" in env else [])]
    return next((int(env[name]) for name in names if env.get(name, "").isdigit()), None)


# Variables that a launcher sets for its processes. A job that is started from one of them must not see these.
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
"""A variable for the processes that a rank starts. `mark_rank` sets it to the rank's process number and `told()`."""


def mark_rank() -> None:
    """Mark the environment, so that child processes recognize that the launcher's variables were meant for this one."""
    os.environ[RANKS_PROCESS] = f"{os.getpid()} {told()}"


def rank_that_was_meant() -> int | None:
    """The process number of the rank that started this process; None if this process may be a rank itself."""
    process, _, what = os.environ.get(RANKS_PROCESS, "").partition(" ")
    if not process or int(process) == os.getpid() or what != told() or launchers_pipe_is_open():
        return None
    return int(process)


@dataclass(frozen=True)
class Parent:
    """The place of a rank in its job, as its child processes know it. Named as in `job.topology.Topology`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


RANKS_PLACE = "HVDLITE_RANKS_PLACE"
"""A variable for child processes, set from init() to shutdown(): as RANKS_PROCESS, then the fields of Parent."""


def mark_place(parent: Parent | None) -> None:
    """Pass this rank's place on to the processes that it starts from now on.

    This must go through the environment: multiprocessing (spawn, forkserver) and subprocess pass nothing else to a
    child, and hvdlite does not see the child start. A forkserver keeps the environment that it was started with.

    Args:
        parent: This rank's place; None after hvd.shutdown().
    """
    if parent is None:
        os.environ.pop(RANKS_PLACE, None)
    else:
        numbers = " ".join(str(int(value)) for value in astuple(parent))
        os.environ[RANKS_PLACE] = f"{os.getpid()} {told()} {numbers}"


def parent() -> Parent | None:
    """The place of the rank that started this process; None if no rank did, or this process may be a rank itself."""
    process, what, *numbers = os.environ.get(RANKS_PLACE, "- -").split()
    if process in ("-", str(os.getpid())) or what != told() or launchers_pipe_is_open():
        return None
    rank, size, local_rank, local_size, cross_rank, cross_size, homogeneous = map(int, numbers)
    return Parent(rank, size, local_rank, local_size, cross_rank, cross_size, bool(homogeneous))


def told() -> str:
    """A digest of the variables by which a launcher tells its jobs and ranks apart.

    It leaves out the launcher's other variables, because initializing MPI changes some of them.
    """
    identity = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(IDENTITY))
    return blake2b(os.fsencode("\n".join(identity)), digest_size=8).hexdigest()


def launchers_pipe_is_open() -> bool | None:
    """Whether this process can talk to the launcher through the pipe PMI_FD; None if the launcher uses no pipe.

    False if subprocess has closed the pipe, or if an earlier program of this rank has ended MPI. Hydra tells jobs apart
    by little else.
    """
    if not os.environ.get("PMI_FD", "").isdigit():
        return None
    pipe = select.poll()
    pipe.register(int(os.environ["PMI_FD"]), select.POLLIN)
    return not any(event & (select.POLLHUP | select.POLLNVAL) for _, event in pipe.poll(0))


def mpi_settings() -> list[str]:
    """The user's settings of the MPI, each as NAME=VALUE, sorted."""
    return sorted(f"{name}={value}" for name, value in os.environ.items()
                  if name.startswith(MPI_SETTINGS) and not is_launchers(name))  # fmt: skip


def offer_cores() -> None:
    """Set Open MPI and Intel MPI to yield the core while they wait, unless the user says otherwise.

    Call it before MPI is initialized. MPICH yields anyway. Otherwise a thread that waits for a short message may keep
    the core from the thread that sends it, for a scheduler's tick of 4 ms. A yield costs about 0.3 us.
    """
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("I_MPI_THREAD_YIELD", "2")


@contextmanager
def alone() -> Iterator[None]:
    """Inside, Open MPI uses no shared memory. For initializing MPI in a process without a launcher.

    Otherwise Open MPI 5 would leave a file in shared memory after the process.
    """
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
    """This process' environment without the launcher's variables and hvdlite's settings, for a new job.

    Args:
        packages: The folder in which the new job finds hvdlite.
    """
    kept = {name: value for name, value in os.environ.items() if not is_launchers(name)}
    job = os.environ.get("HVDLITE_JOB_ID")  # variables that name this job's folders contain it
    kept = {name: value for name, value in kept.items()
            if not name.startswith(("HVDLITE_", "HOROVOD_")) and not (job and job in value)}  # fmt: skip
    if os.geteuid() == 0:  # this job runs as root, so the new one may, too
        kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {"PYTHONPATH": os.pathsep.join(filter(None, (kept.get("PYTHONPATH"), packages)))}


def torchruns_world_size() -> str | None:
    """The number of processes that torchrun has started with this one; None without torchrun."""
    return os.environ.get("WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else None


def open_mpi_local_rank() -> str | None:
    """This process' rank on its host, according to Open MPI's launcher; None without that."""
    return os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK")
