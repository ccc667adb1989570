"""What to execute: settings in, argv and environment out, for each MPI. Pure: it looks at nothing.

Choices for the MPI are made through environment variables wherever the MPI reads them, and only
where the user has not set the variable; `--mpi-args` come after our options on the command line.
So whatever the user says wins, without our parsing any MPI's command line.

Measured on two cores with the PyPI wheels, two ranks: `MPI_Init` of Open MPI 5 takes 1.1 s while it
probes fabrics that one host does not have, and a whole start 0.2 s with `ob1` over `sm` and `tcp`.
That is chosen for the PyPI wheel alone: it would drop CUDA support and fast fabrics elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdlite_launcher.hosts import Host, is_local
from hvdlite_launcher.probe import Family, Mpi

_KEPT_BYTES = 1 << 30


@dataclass(frozen=True)
class Settings:
    """What the user asked for, and what matters of the machine.

    ranks: ranks in all. env: variables given with -x. mpi_args: appended to the launcher's options.
    cores: cores that this process may use. root: whether we run as root.
    """

    ranks: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    mpi_args: tuple[str, ...] = ()
    cores: int = 1
    root: bool = False


@dataclass(frozen=True)
class Place:
    """Where a job keeps what it must not leave behind.

    id: marks every process of the job. folder: pipes, notes and the MPI's own session files.
    shared: folder in shared memory for the MPI's segments, or None where there is none.
    keeper: the command that stands before the user's on every rank.
    """

    id: str
    folder: str
    shared: str | None
    keeper: tuple[str, ...]


@dataclass(frozen=True)
class Command:
    """argv: what to execute. env: variables to add to the environment."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def compose(settings: Settings, mpi: Mpi, place: Place, environ: Mapping[str, str]) -> Command:
    """The launcher's command line and the variables to add to `environ`; nothing set there is changed,
    but for those given with -x."""
    options = _open_mpi_options if mpi.family is Family.OPEN_MPI else _hydra_options
    argv = (mpi.launcher, *options(settings), *settings.mpi_args, *place.keeper, *settings.command)
    defaults = _common_env(settings, mpi) | _allocator_env(environ)
    if mpi.family is Family.OPEN_MPI:
        defaults |= _open_mpi_env(settings, mpi, place, environ)
    env = {name: value for name, value in defaults.items() if name not in environ}
    job = {"HVDLITE_JOB_ID": place.id, "HVDLITE_JOB_DIR": place.folder}
    return Command(argv, env | dict(settings.env) | job)


def _common_env(settings: Settings, mpi: Mpi) -> dict[str, str]:
    env = {
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(max(1, settings.cores // settings.ranks)),
    }
    if mpi.library:
        env["MPI4PY_LIBMPI"] = mpi.library  # several MPIs may share an environment: load the launcher's own
    return env


def _allocator_env(environ: Mapping[str, str]) -> dict[str, str]:
    """Keep glibc from returning freed tensors to the kernel at every step, only to fault them in again.

    Measured, torch on two cores: a step of a 10-million-parameter MLP took up to 10,000 page faults (15 ms of 50), an
    8-layer CNN 1,700, in 21.5 ms instead of 17.8; with these none.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in environ):
        return {}
    return {"MALLOC_MMAP_THRESHOLD_": str(_KEPT_BYTES), "MALLOC_TRIM_THRESHOLD_": str(_KEPT_BYTES)}


def _crowded(settings: Settings) -> bool:
    return settings.ranks >= settings.cores


def _host_list(settings: Settings) -> str:
    names = ("localhost" if is_local(host.name) else host.name for host in settings.hosts)
    return ",".join(f"{name}:{host.slots}" for name, host in zip(names, settings.hosts, strict=True))


def _open_mpi_options(settings: Settings) -> tuple[str, ...]:
    root = ("--allow-run-as-root",) if settings.root else ()
    placement = ("--host", _host_list(settings), "--oversubscribe", "--bind-to", "none")
    return ("-np", str(settings.ranks), *root, *placement)


def _open_mpi_env(settings: Settings, mpi: Mpi, place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    modern = mpi.version >= (5,)
    env = {"OMPI_MCA_osc": "^ucx"}  # else every shared window prints a UCX error
    env["PRTE_MCA_prte_tmpdir_base" if modern else "OMPI_MCA_orte_tmpdir_base"] = place.folder
    if _crowded(settings):
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    if place.shared:
        env[f"OMPI_MCA_btl_{'sm' if modern else 'vader'}_backing_directory"] = place.shared
        env["OMPI_MCA_osc_sm_backing_directory"] = place.shared
    if modern and mpi.wheel and not {"OMPI_MCA_pml", "OMPI_MCA_btl"} & environ.keys():
        env |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    if mpi.launcher.endswith("prterun"):
        env |= {"PRTE_MCA_schizo_proxy": "ompi", "PRTE_PREFIX": mpi.launcher.rsplit("/", 2)[0]}
    return env


def _hydra_options(settings: Settings) -> tuple[str, ...]:
    # No more: MPICH binds nothing by default, and yields a crowded core by itself (measured, 4 ranks on 2
    # cores, 32-byte all-reduce with ranks computing: 0.3 ms; with MPIR_CVAR_ENABLE_HEAVY_YIELD 0.7 ms).
    return ("-n", str(settings.ranks), "-hosts", _host_list(settings))
