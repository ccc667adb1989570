"""The command line of `hvdliterun`: reads it, checks what can be checked before the start, and runs.

Wrong use is one line and exit code 2; a command or an MPI that is not there, 127. Options stand before
the command; all behind its name belongs to it.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import NoReturn

from hvdlite_launcher import readiness
from hvdlite_launcher.command import Command, Place, Settings, compose
from hvdlite_launcher.environment import forwarded, kept
from hvdlite_launcher.hosts import Host, HostsError, located, parse_hostfile, parse_hosts, total_slots
from hvdlite_launcher.output import Printer
from hvdlite_launcher.probe import Mpi, NoMpiError, find_mpi
from hvdlite_launcher.readiness import NotReadyError
from hvdlite_launcher.run import Outcome, run
from hvdlite_launcher.ssh import SSH_AGENTS, Ssh
from hvdlite_launcher.team import Reach

_USAGE = "hvdliterun -np N [-H localhost:N] [options] python train.py [arguments]"
_EXAMPLES = """\
examples:
  hvdliterun -np 4 python train.py --epochs 3       4 ranks on this machine
  hvdliterun -H localhost:4 python train.py         the same: all slots of the host
  hvdliterun -np 2 -v python train.py               show the exact command, the MPI and the start-up times
  hvdliterun -np 2 -x LR=0.1 python train.py        set a variable for all ranks
  hvdliterun -np 2 --mpi-args="--mca btl tcp,self" python train.py

Every line of output carries its rank, [2]<stdout>:text, unless --no-prefix is given. The first rank that
fails ends the job, and its exit code is that of hvdliterun: 128 + n if signal n killed it.
OMPI_MCA_*, OMP_NUM_THREADS and other variables that you have set are left as they are.
"""


class UsageError(Exception):
    """What the user must change, and the exit code that says so."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdliterun` with these arguments (default: the process's own); returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        print(f"usage: {_USAGE}\n(hvdliterun --help tells more)", file=sys.stderr)
        return 2
    _open_stdio()
    try:
        return _launch(_parser().parse_args(arguments))
    except UsageError as error:
        _say(str(error))
        return error.code
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hvdliterun",
        usage=_USAGE,
        description="Start a training script on N ranks over the MPI that is installed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-np", "-n", "--num-proc", dest="ranks", type=int, metavar="N", help="ranks (default: all slots)")
    add("-H", "--hosts", metavar="NAME:SLOTS,...", help="hosts and their slots (default: this machine)")
    add("-hostfile", "--hostfile", metavar="FILE", help="the same from a file, one host per line")
    add("-x", "--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all ranks")
    add("-p", "--ssh-port", type=int, metavar="PORT", help="the other hosts' SSH port")
    add("-i", "--ssh-identity-file", metavar="FILE", help="the key to log in to other hosts with")
    add("--start-timeout", type=float, default=10, metavar="SECONDS", help="for all hosts to be ready (10)")
    add("--network-interfaces", metavar="NAME,...", help="networks to use between hosts (default: MPI's choice)")
    add("--binding-args", metavar="ARGS", help="the MPI launcher's options for placing and binding ranks")
    add("--mpi-args", action="append", default=[], metavar="ARGS", help="more options for the MPI's launcher")
    add("--no-prefix", action="store_true", help="print the ranks' output as it is")
    add("-v", "--verbose", action="store_true", help="show the command, the MPI and where start-up time goes")
    add("--version", action="version", version=f"hvdliterun {_version()}")
    add("--mpi-launcher", metavar="PATH", help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _launch(options: argparse.Namespace) -> int:
    settings = _settings(options)
    begin = time.monotonic()
    try:
        mpi = find_mpi(os.environ, options.mpi_launcher or os.environ.get("HVDLITE_MPIEXEC"))
    except NoMpiError as error:
        raise UsageError(str(error), 127) from error
    found = time.monotonic()

    def prepare(place: Place) -> Command:
        command = compose(settings, mpi, place, environ)
        if options.verbose:
            _show_command(mpi, command, settings)
        return command

    environ = {**kept(os.environ), **forwarded(os.environ)} if settings.several else os.environ
    reach = _reach(settings, options.start_timeout) if settings.several else None
    printer = Printer(not options.no_prefix)
    try:
        outcome = run(
            prepare, settings.command, settings.ranks, environ, reach=reach, printer=printer, verbose=options.verbose
        )
    except NotReadyError as error:
        bad = readiness.unready(error.states)
        _say(f"nothing was started: {len(bad)} of {len(error.states)} hosts not ready")
        readiness.show(error.states)
        return 1
    if outcome.message:
        _say(outcome.message)
    if options.verbose:
        _show_times(found - begin, outcome)
    return outcome.code


def _settings(options: argparse.Namespace) -> Settings:
    command = tuple(options.command[1:] if options.command[:1] == ["--"] else options.command)
    hosts = _hosts(options)
    ranks = _ranks(options.ranks, hosts)
    if not command:
        raise UsageError(f"no command given: {_USAGE}")
    _check_command(command[0])
    return Settings(
        ranks=ranks,
        hosts=hosts or (Host("localhost", ranks),),
        command=command,
        env=dict(_variable(text) for text in options.env),
        mpi_args=tuple(word for text in options.mpi_args for word in _words(text)),
        cores=len(os.sched_getaffinity(0)),
        root=os.geteuid() == 0,
        ssh=_ssh(options),
        interfaces=tuple(filter(None, (options.network_interfaces or "").split(","))),
        binding_args=None if options.binding_args is None else tuple(_words(options.binding_args)),
    )


def _ssh(options: argparse.Namespace) -> Ssh:
    key = options.ssh_identity_file
    if key is not None:
        key = os.path.abspath(key)
        if not os.path.isfile(key):
            raise UsageError(f"--ssh-identity-file {key}: no such file")
        if any(letter.isspace() for letter in key):  # MPIs take ssh's options as one text, cut at blanks
            raise UsageError(f"--ssh-identity-file {key!r}: the MPI cannot be given a path with blanks")
    agents = [os.environ[name] for name in SSH_AGENTS if os.environ.get(name)]
    return Ssh(options.ssh_port, key, max(1, round(options.start_timeout)), agents[0] if agents else None)


def _reach(settings: Settings, timeout: float) -> Reach:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return Reach(settings.hosts, settings.ssh, sys.executable, package, timeout + 3)


def _hosts(options: argparse.Namespace) -> tuple[Host, ...]:
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("give either -H or --hostfile, not both")
    try:
        if options.hosts is not None:
            return located(parse_hosts(options.hosts))
        return located(parse_hostfile(options.hostfile)) if options.hostfile is not None else ()
    except HostsError as error:
        raise UsageError(str(error)) from error


def _ranks(ranks: int | None, hosts: Sequence[Host]) -> int:
    if ranks is None:
        if not hosts:
            raise UsageError("say how many ranks: -np N, or -H localhost:N")
        return total_slots(hosts)
    if ranks < 1:
        raise UsageError(f"-np {ranks}: needs at least 1 rank")
    if hosts and ranks > total_slots(hosts):
        names = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise UsageError(f"-np {ranks}: the hosts have {total_slots(hosts)} slots only ({names})")
    return ranks


def _check_command(name: str) -> None:
    if shutil.which(name):
        return
    if os.path.isfile(name):
        hint = f": did you mean `python {name}`?" if name.endswith(".py") else ""
        raise UsageError(f"{name} is not executable{hint}", 127)
    raise UsageError(f"{name}: command not found", 127)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--mpi-args {text!r}: {error}") from error


def _variable(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given:
        if name not in os.environ:
            raise UsageError(f"-x {name}: the variable is not set; write -x {name}=VALUE")
        value = os.environ[name]
    return name, value


def _show_command(mpi: Mpi, command: Command, settings: Settings) -> None:
    _say(f"MPI: {mpi}")
    _say(f"libmpi: {_libmpi(settings.command[0], {**os.environ, **command.env})}")
    assignments = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(command.env.items()))
    _say(f"command: {assignments} {shlex.join(command.argv)}")


def _libmpi(program: str, env: Mapping[str, str]) -> str:
    """What mpi4py of the command's interpreter loads, asked of a child that does not initialize MPI."""
    python = program if os.path.basename(program).startswith("python") else sys.executable
    code = (
        "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
        "print(MPI.Get_library_version().splitlines()[0].strip(chr(0)))"
    )
    try:
        no_input = subprocess.DEVNULL
        answer = subprocess.run(
            [python, "-c", code], env=env, capture_output=True, text=True, timeout=30, stdin=no_input
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return answer.stdout.strip() or f"unknown ({answer.stderr.strip().splitlines()[-1:]})"


def _show_times(found: float, outcome: Outcome) -> None:
    first = "none" if outcome.first_output is None else f"after {outcome.first_output * 1e3:.0f} ms"
    _say(
        f"start-up: find MPI {found * 1e3:.0f} ms, prepare {outcome.prepared * 1e3:.0f} ms, "
        f"spawn {outcome.spawned * 1e3:.0f} ms, first output {first}"
    )


def _version() -> str:
    try:
        return metadata.version("hvdlite")
    except metadata.PackageNotFoundError:
        return "unknown"


def _open_stdio() -> None:
    """Give closed standard streams a descriptor, lest a pipe of ours be taken for one."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 2:
        descriptor = os.dup(descriptor)
    if descriptor > 2:
        os.close(descriptor)


def _say(text: str) -> None:
    print(f"hvdliterun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
