"""Makes `Settings` of the command line, and checks what can be checked before anything starts."""

import argparse
import contextlib
import dataclasses
import os
import pwd
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence

from hvdlite_launcher import UsageError, slips, tunables
from hvdlite_launcher.command import Settings, Step
from hvdlite_launcher.facts import check_interfaces
from hvdlite_launcher.hosts import Host, located, parse_hostfile, parse_hosts, total_slots, used
from hvdlite_launcher.options import USAGE, seconds
from hvdlite_launcher.probe import Mpi
from hvdlite_launcher.schedulers import Allocation, Starter, allocation, pmi
from hvdlite_launcher.ssh import SSH_AGENTS, Ssh
from hvdlite_launcher.terminal import has_colours
from hvdlite_launcher.times import HOST_TIMEOUT, START_HOST_TIMEOUT, START_TIMEOUT

_AT_ONCE = 64  # processes
_RULE = re.compile(rb"(?m)^stricthostkeychecking (?!ask$)")  # ssh's default is "ask"


def settings(options: argparse.Namespace, mpi: Mpi, environ: Mapping[str, str]) -> tuple[Settings, list[str]]:
    """The settings, and lines that tell the user which of them have no effect. Raises UsageError."""
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    given = _allocation(options, environ)
    hosts = _hosts(options, given)
    ranks = _ranks(options.ranks, hosts)
    if not command:
        raise UsageError(f"no command given: {USAGE}")
    if wrong := slips.wrong_command(command, options.flags):
        raise UsageError(wrong, 127)
    config = tunables.load(options.config_file, options.mpi) if options.config_file else {}
    chosen = list(tunables.chosen(options, config))
    tuned = tunables.variables(chosen)
    step = _step(options, given, mpi)
    if step is None:
        _check_stdin(command, ranks, options.flags)
    made = Settings(
        ranks=ranks,
        hosts=_placed(hosts, ranks, step, options),
        command=command,
        env=_talk(options, environ) | tuned | variables(options, environ),
        mpi_args=tuple(word for text in options.mpi_args for word in _words("--mpi-args", text)),
        root=os.geteuid() == 0,
        ssh=way(options, environ, given.shell if given else None),
        interfaces=_interfaces(options),
        tcp=options.tcp,
        binding_args=None if options.binding_args is None else tuple(_words("--binding-args", options.binding_args)),
        host_timeout=(options.host_timeout or START_HOST_TIMEOUT, options.host_timeout or HOST_TIMEOUT),
        step=step,
    )
    if made.several and not made.ssh.program:
        others = [host.name for host in made.hosts if not host.local]
        made = dataclasses.replace(made, ssh=dataclasses.replace(made.ssh, has_own_rule=_has_own_rule(others)))
    if not made.elsewhere:  # else each agent checks its host
        try:
            check_interfaces(made.interfaces, several=False)
        except OSError as error:
            raise UsageError(f"--network-interfaces: {error}") from error
    unknown = [f"{options.config_file}: {name}: no such setting, no effect" for name in tunables.unknown(config)]
    return made, [*tunables.explanations(chosen), *unknown]


def named_hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts of -H or --hostfile; empty if neither is given. Raises UsageError."""
    return located(_hosts(options, None))


def variables(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of -x. Raises UsageError."""
    return dict(_variable(text, environ) for text in options.env)


def _allocation(options: argparse.Namespace, environ: Mapping[str, str]) -> Allocation | None:
    """The scheduler's allocation, or None if there is none or the user names hosts."""
    if options.hosts is not None or options.hostfile is not None:
        return None
    found = allocation(environ)
    if options.jsrun and not (found and found.starter is Starter.JSRUN):
        raise UsageError("--jsrun: not inside a job of LSF that has jsrun: leave it out")
    return found


def _step(options: argparse.Namespace, given: Allocation | None, mpi: Mpi) -> Step | None:
    """How the scheduler starts the ranks. None if the MPI's launcher does: with --mpi, without a scheduler, or if the
    MPI and the scheduler have no protocol in common."""
    if given is None:
        return None
    if given.starter is None or options.mpi:
        if given.name == "Flux":
            cure = "put it on PATH and leave --mpi out, or name the hosts with -H"
            raise UsageError(f"inside a job of Flux only the program `flux` knows the hosts: {cure}")
        return None
    dialect = pmi(given.starter, given.path, mpi)
    return None if dialect is None else Step(given.starter, given.path, dialect)


def _hosts(options: argparse.Namespace, given: Allocation | None) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("give either -H or --hostfile, not both")
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if options.hostfile is not None:
        return parse_hostfile(options.hostfile)
    return given.hosts if given else ()


def _placed(hosts: tuple[Host, ...], ranks: int, step: Step | None, options: argparse.Namespace) -> tuple[Host, ...]:
    """The hosts that will have ranks, and which of them is this host."""
    if not hosts:
        return (Host("localhost", ranks),)
    if options.binding_args is None and not options.mpi_args:
        hosts = used(hosts, ranks)
    return tuple(dataclasses.replace(host, local=True) for host in hosts) if step else located(hosts)


def _ranks(ranks: int | None, hosts: Sequence[Host]) -> int:
    if ranks is None:
        if not hosts:
            raise UsageError("say how many ranks: -np N, or -H localhost:N")
        ranks = total_slots(hosts)
        if not ranks:
            raise UsageError("the job's hosts have no slots: name the ranks of each host, -H NAME:SLOTS")
    if ranks < 1:
        raise UsageError(f"-np {ranks}: needs at least 1 rank")
    if hosts and ranks > total_slots(hosts):
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(
            f"-np {ranks}: the hosts have slots for {total_slots(hosts)} only ({names}): lower -np, or raise "
            "the slots [HVD002]"
        )
    return ranks


def _check_stdin(command: Sequence[str], ranks: int, flags: Sequence[str]) -> None:
    """Refuse a script on stdin for several ranks: only rank 0 has a stdin, unless a scheduler copies it."""
    meant = slips.script_on_stdin(command)
    if ranks > 1 and meant:
        others = "rank 1" if ranks == 2 else f"ranks 1 to {ranks - 1}"
        raise UsageError(
            f"{shlex.join(command)}: the script would come from stdin, but only rank 0 has a stdin, and {others} would "
            f"run nothing [HVD003]. Save it in a file, and write: {slips.line([*flags, *meant])}"
        )


def _words(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"{flag} {text!r}: {error}") from error


def _variable(text: str, environ: Mapping[str, str]) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not name:
        raise UsageError(f"-x {text}: write -x NAME=VALUE")
    if not given:
        if name not in environ:
            raise UsageError(f"-x {name}: the variable is not set; write -x {name}=VALUE")
        value = environ[name]
    return name, value


def _interfaces(options: argparse.Namespace) -> tuple[str, ...]:
    texts = [options.network_interfaces or "", *options.network_interface]
    names = [name.strip() for text in texts for name in text.split(",")]
    return tuple(dict.fromkeys(filter(None, names)))


def _talk(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """With -v the ranks log what they decide, unless the user has set a level. With --summary or -v rank 0 makes a
    summary, unless the user has set the variable for it."""
    told = {"HVDLITE_LOG_LEVEL", "HOROVOD_LOG_LEVEL"} & environ.keys()
    made = {"HVDLITE_LOG_LEVEL": "INFO"} if options.verbose and not told else {}
    if (options.summary or options.verbose) and "HVDLITE_SUMMARY" not in environ:
        made["HVDLITE_SUMMARY"] = "color" if has_colours(2, environ) else "1"
    return made


def _start_timeout(options: argparse.Namespace, environ: Mapping[str, str]) -> float:
    name = "HOROVOD_START_TIMEOUT"
    try:
        return float(options.start_timeout or seconds(environ.get(name) or str(START_TIMEOUT)))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"the environment variable {name}: {error}") from error


def way(options: argparse.Namespace, environ: Mapping[str, str], shell: str | None = None) -> Ssh:
    """How to reach other hosts. shell: the scheduler's remote shell. Raises UsageError."""
    key = options.ssh_identity_file
    if key is not None:
        key = os.path.abspath(key)
        if not os.path.isfile(key):
            raise UsageError(f"--ssh-identity-file {key}: no such file")
        if any(letter.isspace() for letter in key):  # MPIs take ssh's options as one text, and split it at blanks
            raise UsageError(
                f"--ssh-identity-file {key!r}: the MPI cannot be given a path with blanks: move the key, or link to it"
            )
    agents = [environ[name] for name in SSH_AGENTS if environ.get(name)]
    csh = os.path.basename(_login_shell(environ)) in ("csh", "tcsh")
    timeout = max(1, round(_start_timeout(options, environ)))
    return Ssh(options.ssh_port, key, timeout, agents[0] if agents else shell, csh)


def _has_own_rule(names: Sequence[str]) -> bool:
    """Whether ssh's configuration has a rule for host keys for one of these hosts. All hosts get the same options."""
    pipe, null = subprocess.PIPE, subprocess.DEVNULL
    for start in range(0, len(names), _AT_ONCE):
        argvs = [["ssh", "-G", name] for name in names[start : start + _AT_ONCE]]
        try:
            asked = [subprocess.Popen(argv, stdin=null, stdout=pipe, stderr=null) for argv in argvs]
        except FileNotFoundError:  # the team reports a missing ssh
            return False
        answers = [process.communicate()[0] for process in asked]
        if any(_RULE.search(answer) for answer in answers):
            return True
    return False


def _login_shell(environ: Mapping[str, str]) -> str:
    """The user's login shell, found as Open MPI finds it."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_shell
    return environ.get("SHELL", "")
