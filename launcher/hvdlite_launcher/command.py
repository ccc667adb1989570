"""What to execute: settings in, argv and environment out, for each MPI. Pure: it looks at nothing.

Choices for the MPI are made through environment variables wherever the MPI reads them, and only
where the user has not set the variable; `--mpi-args` come after our options on the command line.
So whatever the user says wins, without our parsing any MPI's command line.

Measured on two cores with the PyPI wheels, two ranks: `MPI_Init` of Open MPI 5 takes 1.1 s while it
probes fabrics that one host does not have, and a whole start 0.2 s with `ob1` over `sm` and `tcp`.
That is chosen for the PyPI wheel alone: it would drop CUDA support and fast fabrics elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdlite_launcher.agent import LATER, PATIENCE
from hvdlite_launcher.cores import SLOTS
from hvdlite_launcher.environment import LOGIN
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.schedulers import Starter
from hvdlite_launcher.ssh import Ssh
from hvdlite_launcher.usage import UsageError

_LONGEST = 125_000  # bytes of a command that Open MPI's daemons can start: they write it into one variable


@dataclass(frozen=True)
class Step:
    """A scheduler's start of ranks. path: of its program. pmi: how the MPI's processes will find each other."""

    starter: Starter
    path: str
    pmi: str


@dataclass(frozen=True)
class Settings:
    """What the user asked for, and what matters of the machine.

    ranks: ranks in all. env: variables given with -x. mpi_args: appended to the launcher's options.
    root: whether we run as root. interfaces: networks to use, or all.
    tcp: whether to keep off other networks than TCP.
    binding_args: instead of our own on placing and binding ranks, or None. start_timeout: seconds for all hosts to be
    ready. host_timeout: seconds of silence after which a host counts as lost, until ranks have started there, and
    afterwards. step: how a scheduler starts the ranks,
    or None where the MPI's launcher does.
    """

    ranks: int
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    mpi_args: tuple[str, ...] = ()
    root: bool = False
    ssh: Ssh = field(default_factory=Ssh)
    interfaces: tuple[str, ...] = ()
    tcp: bool = False
    binding_args: tuple[str, ...] | None = None
    start_timeout: float = 13.0
    host_timeout: tuple[float, float] = (PATIENCE, LATER)
    step: Step | None = None

    @property
    def several(self) -> bool:
        """Whether hosts other than this one take part that we watch over ourselves."""
        return any(not host.local for host in self.hosts)

    @property
    def elsewhere(self) -> bool:
        """Whether ranks may be on other hosts."""
        return self.several or self.step is not None

    @property
    def most_slots(self) -> int:
        """Ranks on the fullest host."""
        return min(self.ranks, max(host.slots for host in self.hosts))

    def ranks_of(self, name: str) -> range | None:
        """The ranks of this host, which are filled in order; None where the user's options may say otherwise."""
        if self.mpi_args or self.binding_args is not None:
            return None
        names = [host.name for host in self.hosts]
        first = sum(host.slots for host in self.hosts[: names.index(name)])
        return range(first, first + self.hosts[names.index(name)].slots)


@dataclass(frozen=True)
class Place:
    """Where a job keeps what it must not leave behind.

    id: marks every process of the job. folder: pipes, notes and the MPI's own session files.
    shared: folder in shared memory for the MPI's segments, or None where there is none.
    keeper: the command that stands before the user's on every rank. bourne: what stands before ssh for Open MPI.
    """

    id: str
    folder: str
    shared: str | None
    keeper: tuple[str, ...]
    bourne: tuple[str, ...] = ()
    base: str = ""

    @property
    def root(self) -> str:
        """The job's folder, under the same name on all hosts: `folder` is this host's part of it."""
        return self.base or self.folder


@dataclass(frozen=True)
class Command:
    """argv: what to execute. env: variables to add to the environment.

    labelled: it prints the output of ranks that have no pipe to us, each line behind its rank and a colon.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    labelled: bool = False


def compose(settings: Settings, mpi: Mpi, place: Place, environ: Mapping[str, str]) -> Command:
    """The launcher's command line and the variables to add to `environ`; nothing set there is changed,
    but for those given with -x. Raises UsageError for a command that is too long."""
    length = sum(len(os.fsencode(word)) + 1 for word in settings.command)
    if mpi.family is Family.OPEN_MPI and length > _LONGEST and not settings.step:
        raise UsageError(
            f"the command with its arguments has {length} bytes, of which Open MPI starts {_LONGEST} at most: let the "
            "script read its arguments from a file, or find them itself"
        )
    own_env, own_options = _DIALECTS[mpi.family]
    defaults = _common_env(settings, mpi) | own_env(settings, mpi, place, environ)
    defaults |= _tcp_env(mpi) if settings.tcp else {}
    env = {name: value for name, value in defaults.items() if name not in environ} | dict(settings.env)
    env |= {"HVDLITE_JOB_ID": place.id, "HVDLITE_JOB_DIR": place.root, SLOTS: str(settings.most_slots)}
    if settings.several:
        env["HVDLITE_JOB_HOSTS"] = str(len(settings.hosts))
    if settings.step:
        if "SLURM_STEP_ID" in environ:  # of an interactive step, which has all the cores that ours would wait for
            env.setdefault("SLURM_OVERLAP", "1")
        start = _step_options(settings, settings.step)
        return Command((*start, *place.keeper, *_spelled(settings)), env, labelled=True)
    options = own_options(settings, {**environ, **env})
    return Command((mpi.launcher, *options, *settings.mpi_args, *place.keeper, *_spelled(settings)), env)


def _spelled(settings: Settings) -> list[str]:
    """The user's command as its keeper reads it: a word that is a colon, at which MPIs' launchers would begin another
    program, gets a backslash, as does one that has some already."""
    return ["\\" + word if word.lstrip("\\") == ":" else word for word in settings.command]


def _common_env(settings: Settings, mpi: Mpi) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1"}
    if settings.interfaces:
        env["NCCL_SOCKET_IFNAME"] = ",".join(settings.interfaces)
    if mpi.library:
        env["MPI4PY_LIBMPI"] = mpi.library  # several MPIs may share an environment: load the launcher's own
    return env


def _tcp_env(mpi: Mpi) -> dict[str, str]:
    """Keep all libraries off other networks than TCP. MPIs without such a network ignore theirs."""
    ours = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": f"self,{_shared_memory(mpi)},tcp", "FI_PROVIDER": "tcp"}
    return {**ours, "UCX_TLS": "tcp,sm,self", "NCCL_IB_DISABLE": "1"}


def _shared_memory(mpi: Mpi) -> str:
    """Open MPI's name for messages through it; another one's keeps version 4 from starting."""
    return "vader" if mpi.family is Family.OPEN_MPI and mpi.version < (5,) else "sm"


def _hosts(settings: Settings) -> list[tuple[str, int]]:
    """Each host as the MPI is to call it, and its slots."""
    return [(host.name if settings.several else "localhost", host.slots) for host in settings.hosts]


def _host_list(settings: Settings) -> str:
    return ",".join(f"{name}:{slots}" for name, slots in _hosts(settings))


def _open_mpi_options(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    root = ("--allow-run-as-root",) if settings.root else ()
    # On several hosts it would have Open MPI put all on the first one, unless told to go by slots.
    placement = ("--host", _host_list(settings), *(() if settings.several else ("--oversubscribe",)))
    names = sorted(name for name in env if name not in LOGIN or name in settings.env) if settings.several else ()
    return (
        *("-np", str(settings.ranks), *root, *placement, *_open_mpi_binding(settings)),
        *(word for name in names for word in ("-x", name)),
    )


def _open_mpi_binding(settings: Settings) -> tuple[str, ...]:
    """The user's, or ours but for what is among --mpi-args: Open MPI refuses an option that is given twice."""
    if settings.binding_args is not None:
        return settings.binding_args
    own = {"--bind-to": "none", **({"--map-by": "slot"} if settings.several else {})}
    return tuple(word for option, value in own.items() if option not in settings.mpi_args for word in (option, value))


def _open_mpi_env(settings: Settings, mpi: Mpi, place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    modern = mpi.version >= (5,)
    env = {
        "OMPI_MCA_osc": "^ucx",  # else every shared window prints a UCX error
        "OMPI_MCA_mpi_yield_when_idle": "1",  # ranks' threads share their cores, which one that waits must not keep
    }
    if not settings.step:  # on other hosts of a scheduler the job has no folders
        env["PRTE_MCA_prte_tmpdir_base" if modern else "OMPI_MCA_orte_tmpdir_base"] = place.root
    if place.shared and not settings.step:
        env[f"OMPI_MCA_btl_{_shared_memory(mpi)}_backing_directory"] = place.shared
        env["OMPI_MCA_osc_sm_backing_directory"] = place.shared
    if modern and mpi.wheel and not {"OMPI_MCA_pml", "OMPI_MCA_btl"} & environ.keys():
        env |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    if mpi.launcher.endswith("prterun"):
        env |= {"PRTE_MCA_schizo_proxy": "ompi", "PRTE_PREFIX": mpi.launcher.rsplit("/", 2)[0]}
    if settings.several:
        env |= settings.ssh.for_open_mpi(modern, len(settings.hosts), place.bourne)
    if settings.interfaces:
        names = ",".join(settings.interfaces)
        env["OMPI_MCA_btl_tcp_if_include"] = names
        if settings.several:  # daemons need none on one host, and Open MPI 5's none that is the loopback
            env["PRTE_MCA_prte_if_include" if modern else "OMPI_MCA_oob_tcp_if_include"] = names
    return env


def _hydra_env(settings: Settings, mpi: Mpi, place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    env: dict[str, str] = {}
    if settings.several and settings.ssh.program:
        env |= {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": settings.ssh.program}  # as ssh it gets `-x` first
    elif settings.several:
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(settings.ssh.options)
    if settings.interfaces:
        env["FI_TCP_IFACE"] = settings.interfaces[0]
    return env


def _hydra_options(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    # No more: MPICH binds nothing by default, and yields a crowded core by itself (measured, 4 ranks on 2
    # cores, 32-byte all-reduce with ranks computing: 0.3 ms; with MPIR_CVAR_ENABLE_HEAVY_YIELD 0.7 ms).
    interface = ("-iface", settings.interfaces[0]) if settings.interfaces else ()
    binding = settings.binding_args or ()
    return ("-n", str(settings.ranks), "-hosts", _host_list(settings), *interface, *binding)


def _intel_mpi_env(settings: Settings, mpi: Mpi, place: Place, environ: Mapping[str, str]) -> dict[str, str]:
    env = {
        "I_MPI_THREAD_YIELD": "2",  # sched_yield, as for Open MPI: by default it keeps its core while it waits
        "I_MPI_SILENT_ABORT": "1",  # we tell of failures ourselves
    }
    if settings.binding_args is None:
        env["I_MPI_PIN"] = "0"
    if place.shared and not settings.step:
        env["I_MPI_SHM_FILE_PREFIX_4K"] = place.shared
    if settings.several:
        env["I_MPI_HYDRA_BOOTSTRAP"] = "rsh" if settings.ssh.program else "ssh"
        how = {"EXEC": settings.ssh.program, "EXEC_EXTRA_ARGS": " ".join(settings.ssh.options)}
        env |= {f"I_MPI_HYDRA_BOOTSTRAP_{name}": value for name, value in how.items() if value}
    if settings.interfaces:
        env |= {"FI_TCP_IFACE": settings.interfaces[0], "I_MPI_HYDRA_IFACE": settings.interfaces[0]}
    return env


def _intel_mpi_options(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    """Its Hydra reads no counts behind hosts' names but from a file."""
    names = [name for name, slots in _hosts(settings) for _ in range(slots)][: settings.ranks]
    return ("-hosts", ",".join(names), "-ppn", "1", "-n", str(settings.ranks), *(settings.binding_args or ()))


_DIALECTS = {
    Family.OPEN_MPI: (_open_mpi_env, _open_mpi_options),
    Family.MPICH: (_hydra_env, _hydra_options),
    Family.INTEL_MPI: (_intel_mpi_env, _intel_mpi_options),
}
"""What each MPI's launcher understands: variables, but for those in `environ`, and options, given the ranks' `env`."""


def _step_options(settings: Settings, step: Step) -> tuple[str, ...]:
    ranks, more = str(settings.ranks), settings.binding_args
    if step.starter is Starter.SRUN:
        nodes = ("--nodes", str(len(settings.hosts)), "--distribution", "block")
        how = (f"--mpi={step.pmi}", "--kill-on-bad-exit=1", "--label")
        binding = (*nodes, "--cpu-bind=none") if more is None else more
        return (step.path, "--ntasks", ranks, *binding, *how, *settings.mpi_args)
    if step.starter is Starter.JSRUN:
        sets = ("--nrs", ranks, "--tasks_per_rs", "1", "--rs_per_host", str(settings.most_slots))
        binding = (*sets, "--cpu_per_rs", "1", "--bind", "none") if more is None else more
        return (step.path, *binding, "--stdio_mode", "prepended", *settings.mpi_args)
    pmi = ("-o", f"pmi={step.pmi}") if step.pmi else ()
    return (step.path, "run", "-n", ranks, *(more or ()), *pmi, "--label-io", *settings.mpi_args)
