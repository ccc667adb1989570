"""Composes the job's command: makes arguments and environment variables of the settings, for each MPI.

This module is pure: it reads no file, and callers pass the environment as an argument. It sets an option of the MPI by
an environment variable if the MPI reads one, but no variable that the user has set. `--mpi-args` come last on the
command line. So the user's choices win, and hvdliterun need not understand the command line of any MPI.

With the PyPI wheel of Open MPI 5, `MPI_Init` takes 1.1 s by default, while it looks for fabrics that one host does not
have. A whole start with `ob1`, `sm` and `tcp` takes 0.2 s (two ranks, two cores). hvdliterun chooses these for the
wheel alone: other builds would lose CUDA support and fast fabrics.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdlite_launcher import UsageError
from hvdlite_launcher.cores import SLOTS
from hvdlite_launcher.environment import LOGIN
from hvdlite_launcher.hosts import Host
from hvdlite_launcher.probe import Family, Mpi
from hvdlite_launcher.schedulers import Starter
from hvdlite_launcher.ssh import Ssh
from hvdlite_launcher.times import AFTER_SSH, HOST_TIMEOUT, START_HOST_TIMEOUT

_LONGEST = 125_000  # bytes of a command: Open MPI's daemons write it into one variable


@dataclass(frozen=True)
class Step:
    """A scheduler starts the ranks. path: of its program. pmi: the protocol by which the MPI's processes meet."""

    starter: Starter
    path: str
    pmi: str


@dataclass(frozen=True)
class Settings:
    """What the user asked for.

    ranks: on all hosts. env: variables given with -x. mpi_args: appended to the launcher's options. root: whether
    hvdliterun runs as root. interfaces: networks to use; all if empty. tcp: whether to use no network but TCP.
    binding_args: options for placing and binding ranks that replace hvdliterun's, or None. host_timeout: seconds of
    silence after which a host counts as lost, before and after a rank has started there. step: how a scheduler starts
    the ranks, or None if the MPI's launcher does.
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
    host_timeout: tuple[float, float] = (START_HOST_TIMEOUT, HOST_TIMEOUT)
    step: Step | None = None

    @property
    def start_timeout(self) -> float:
        """Seconds for all hosts to be ready. ssh gives up earlier, and its message says why."""
        return self.ssh.connect_timeout + AFTER_SSH

    @property
    def several(self) -> bool:
        """Whether other hosts take part, each with an agent."""
        return any(not host.local for host in self.hosts)

    @property
    def elsewhere(self) -> bool:
        """Whether ranks may be on other hosts, with or without an agent."""
        return self.several or self.step is not None

    @property
    def most_slots(self) -> int:
        """The largest number of ranks on one host."""
        return min(self.ranks, max(host.slots for host in self.hosts))

    def ranks_of(self, name: str) -> range | None:
        """The ranks of this host, or None if the user's options may place ranks in another way."""
        if self.mpi_args or self.binding_args is not None:
            return None
        names = [host.name for host in self.hosts]
        first = sum(host.slots for host in self.hosts[: names.index(name)])
        return range(first, first + self.hosts[names.index(name)].slots)


@dataclass(frozen=True)
class Job:
    """One run of the user's command. The agents remove what it leaves.

    id: the mark of the job's processes. folder: for `job_folder.FILES` and the MPI's own files; it has the same name on
    all hosts. shared: a folder in shared memory for the MPI's segments, or None. keeper: the command before the user's
    command, on every rank. bourne: the command before ssh, for Open MPI. launched: when hvdliterun began, in seconds
    since the epoch.
    """

    id: str
    folder: str
    shared: str | None
    keeper: tuple[str, ...]
    bourne: tuple[str, ...] = ()
    launched: float = 0.0


@dataclass(frozen=True)
class Command:
    """argv: what to execute. env: variables to add to the environment.

    labelled: it prints the output of ranks without an agent; each line begins with the rank and a colon.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    labelled: bool = False


def compose(settings: Settings, mpi: Mpi, job: Job, environ: Mapping[str, str]) -> Command:
    """The command of a job. Only variables given with -x replace variables in `environ`.

    Raises UsageError if the user's command is too long.
    """
    length = sum(len(os.fsencode(word)) + 1 for word in settings.command)
    if mpi.family is Family.OPEN_MPI and length > _LONGEST and not settings.step:
        raise UsageError(
            f"the command and its arguments have {length} bytes, but Open MPI accepts at most {_LONGEST}: let the "
            "script read its arguments from a file"
        )
    own_env, own_options = _DIALECTS[mpi.family]
    defaults = _common_env(settings, mpi) | own_env(settings, mpi, job, environ)
    defaults |= _tcp_env(mpi) if settings.tcp else {}
    env = {name: value for name, value in defaults.items() if name not in environ} | dict(settings.env)
    env |= {"HVDLITE_JOB_ID": job.id, "HVDLITE_JOB_DIR": job.folder, SLOTS: str(settings.most_slots)}
    env["HVDLITE_LAUNCHED"] = f"{job.launched:.3f}"
    if settings.several:
        env["HVDLITE_JOB_HOSTS"] = str(len(settings.hosts))
    if settings.step:
        if "SLURM_STEP_ID" in environ:  # of an interactive step, which has all the cores that ours would wait for
            env.setdefault("SLURM_OVERLAP", "1")
        start = _step_options(settings, settings.step)
        return Command((*start, *job.keeper, *_spelled(settings)), env, labelled=True)
    options = own_options(settings, {**environ, **env})
    return Command((mpi.launcher, *options, *settings.mpi_args, *job.keeper, *_spelled(settings)), env)


def _spelled(settings: Settings) -> list[str]:
    """The user's command as the keeper reads it. A word `:` would begin another program for the MPIs' launchers, so it
    becomes `\\:`; words `\\:` get one more backslash."""
    return ["\\" + word if word.lstrip("\\") == ":" else word for word in settings.command]


def _common_env(settings: Settings, mpi: Mpi) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1"}
    if settings.interfaces:
        env["NCCL_SOCKET_IFNAME"] = ",".join(settings.interfaces)
    if mpi.library:
        env["MPI4PY_LIBMPI"] = mpi.library  # several MPIs may share an environment: load the launcher's own
    return env


def _tcp_env(mpi: Mpi) -> dict[str, str]:
    """Variables with which libraries use no network but TCP. An MPI ignores those of other libraries."""
    ours = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": f"self,{_shared_memory(mpi)},tcp", "FI_PROVIDER": "tcp"}
    return {**ours, "UCX_TLS": "tcp,sm,self", "NCCL_IB_DISABLE": "1"}


def _shared_memory(mpi: Mpi) -> str:
    """Open MPI's name for its shared-memory transport. Version 4 does not start if it is given a wrong name."""
    return "vader" if mpi.family is Family.OPEN_MPI and mpi.version < (5,) else "sm"


def _hosts(settings: Settings) -> list[tuple[str, int]]:
    """Each host's name for the MPI, and its slots."""
    return [(host.name if settings.several else "localhost", host.slots) for host in settings.hosts]


def _host_list(settings: Settings) -> str:
    return ",".join(f"{name}:{slots}" for name, slots in _hosts(settings))


def _open_mpi_options(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    root = ("--allow-run-as-root",) if settings.root else ()
    # On several hosts --oversubscribe would put all ranks on the first host.
    placement = ("--host", _host_list(settings), *(() if settings.several else ("--oversubscribe",)))
    names = sorted(name for name in env if name not in LOGIN or name in settings.env) if settings.several else ()
    return (
        *("-np", str(settings.ranks), *root, *placement, *_open_mpi_binding(settings)),
        *(word for name in names for word in ("-x", name)),
    )


def _open_mpi_binding(settings: Settings) -> tuple[str, ...]:
    """The user's options, or hvdliterun's except those in --mpi-args: Open MPI refuses to see an option twice."""
    if settings.binding_args is not None:
        return settings.binding_args
    own = {"--bind-to": "none", **({"--map-by": "slot"} if settings.several else {})}
    return tuple(word for option, value in own.items() if option not in settings.mpi_args for word in (option, value))


def _open_mpi_env(settings: Settings, mpi: Mpi, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    modern = mpi.version >= (5,)
    env = {
        "OMPI_MCA_osc": "^ucx",  # else each shared window prints an error of UCX
        "OMPI_MCA_mpi_yield_when_idle": "1",  # a rank that waits must not keep its core from other threads
    }
    if not settings.step:  # else other hosts have no such folder
        env["PRTE_MCA_prte_tmpdir_base" if modern else "OMPI_MCA_orte_tmpdir_base"] = job.folder
    if job.shared and not settings.step:
        env[f"OMPI_MCA_btl_{_shared_memory(mpi)}_backing_directory"] = job.shared
        env["OMPI_MCA_osc_sm_backing_directory"] = job.shared
    if modern and mpi.wheel and not {"OMPI_MCA_pml", "OMPI_MCA_btl"} & environ.keys():
        env |= {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,tcp"}
    if mpi.launcher.endswith("prterun"):
        env |= {"PRTE_MCA_schizo_proxy": "ompi", "PRTE_PREFIX": mpi.launcher.rsplit("/", 2)[0]}
    if settings.several:
        env |= settings.ssh.for_open_mpi(modern, len(settings.hosts), job.bourne)
    if settings.interfaces:
        names = ",".join(settings.interfaces)
        env["OMPI_MCA_btl_tcp_if_include"] = names
        if settings.several:  # on one host the daemons need none, and Open MPI 5 refuses the loopback
            env["PRTE_MCA_prte_if_include" if modern else "OMPI_MCA_oob_tcp_if_include"] = names
    return env


def _hydra_env(settings: Settings, mpi: Mpi, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    env: dict[str, str] = {}
    if settings.several and settings.ssh.program:
        env |= {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": settings.ssh.program}  # `ssh` would get -x
    elif settings.several:
        env["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(settings.ssh.options)
    if settings.interfaces:
        env["FI_TCP_IFACE"] = settings.interfaces[0]
    return env


def _hydra_options(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    # MPICH binds no rank by default, and yields a crowded core by itself. (Four ranks on two cores, 32-byte all-reduce
    # while ranks compute: 0.3 ms; with MPIR_CVAR_ENABLE_HEAVY_YIELD 0.7 ms.)
    interface = ("-iface", settings.interfaces[0]) if settings.interfaces else ()
    binding = settings.binding_args or ()
    return ("-n", str(settings.ranks), "-hosts", _host_list(settings), *interface, *binding)


def _intel_mpi_env(settings: Settings, mpi: Mpi, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    env = {
        "I_MPI_THREAD_YIELD": "2",  # sched_yield: by default a rank that waits keeps its core
        "I_MPI_SILENT_ABORT": "1",  # hvdliterun reports failures
    }
    if settings.binding_args is None:
        env["I_MPI_PIN"] = "0"
    if job.shared and not settings.step:
        env["I_MPI_SHM_FILE_PREFIX_4K"] = job.shared
    if settings.several:
        env["I_MPI_HYDRA_BOOTSTRAP"] = "rsh" if settings.ssh.program else "ssh"
        how = {"EXEC": settings.ssh.program, "EXEC_EXTRA_ARGS": " ".join(settings.ssh.options)}
        env |= {f"I_MPI_HYDRA_BOOTSTRAP_{name}": value for name, value in how.items() if value}
    if settings.interfaces:
        env |= {"FI_TCP_IFACE": settings.interfaces[0], "I_MPI_HYDRA_IFACE": settings.interfaces[0]}
    return env


def _intel_mpi_options(settings: Settings, env: Mapping[str, str]) -> tuple[str, ...]:
    """Intel's Hydra reads slots from a file only, so each rank gets its host in the list."""
    names = [name for name, slots in _hosts(settings) for _ in range(slots)][: settings.ranks]
    return ("-hosts", ",".join(names), "-ppn", "1", "-n", str(settings.ranks), *(settings.binding_args or ()))


_DIALECTS = {
    Family.OPEN_MPI: (_open_mpi_env, _open_mpi_options),
    Family.MPICH: (_hydra_env, _hydra_options),
    Family.INTEL_MPI: (_intel_mpi_env, _intel_mpi_options),
}
"""For each MPI: the variables that it reads, and the options of its launcher."""


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
