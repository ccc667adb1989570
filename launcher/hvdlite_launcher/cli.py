"""The program `hvdliterun`: reads its command line, checks it, and runs the job.

Options come before the user's command; all words after the command's name belong to the command. Exit codes of
hvdliterun itself: 2 for wrong use; 127 if the command, an MPI or ssh is not found; 1 if a host is not ready (with a
table of several hosts), or if --check finds nothing ready; 130 for Ctrl-C before the job has begun.
"""

import argparse
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdlite_launcher import UsageError, checks, facts, readiness, shown, templates, terminal
from hvdlite_launcher.command import Command, Job, Settings, compose
from hvdlite_launcher.environment import forwarded, kept
from hvdlite_launcher.options import USAGE, parse, written
from hvdlite_launcher.output import Printer
from hvdlite_launcher.places import write_all
from hvdlite_launcher.prefixes import Prefixes, Style
from hvdlite_launcher.probe import Mpi, find_mpi
from hvdlite_launcher.readiness import NotReadyError
from hvdlite_launcher.run import Outcome, new_job, run
from hvdlite_launcher.settings import settings
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import dismiss, own_agent
from hvdlite_launcher.times import LIBRARY_ANSWERS

ABOUT_PLACES = ("template", "ranks", "hosts", "hostfile")  # options that a job script leaves to the scheduler


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdliterun` with these arguments (default: those of this process). Returns its exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments:
        print(f"usage: {USAGE}\n(hvdliterun --help tells more)", file=sys.stderr)
        return 2
    _open_stdio()
    try:
        options = parse(arguments)
        if options.check:
            _find_home()
            return checks.check(options)
        if options.template:
            return _write(templates.script(options, written(options, ABOUT_PLACES)))
        if options.dry_run:
            return _dry_run(options)
        outcome = launch(options)
        if outcome.message:
            say(outcome.message)
        return outcome.code
    except UsageError as error:
        say(str(error))
        return error.code
    except NotReadyError as error:
        say(str(error))
        readiness.show(error.states)
        return 1
    except KeyboardInterrupt:
        return 130


def _find_home() -> None:
    """Set HOME if it is missing, as in some services and containers: Open MPI's mpirun does nothing without it."""
    if "HOME" not in os.environ:
        try:
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container's user without a name
            os.environ["HOME"] = "/"


def launch(options: argparse.Namespace, task: bytes | None = None) -> Outcome:
    """Run the job that the command line asks for. task: see `run.run`. Raises UsageError, NotReadyError."""
    agent = own_agent()  # it starts while hvdliterun looks for the MPI
    try:
        with _environment_as_before():
            return _launch(options, task, agent)
    finally:
        dismiss(agent)


@dataclass(frozen=True)
class Plan:
    """What hvdliterun is about to start.

    prefixes: of the ranks' output. environ: the variables to which the command's are added. begun: when hvdliterun
    began, in seconds since the epoch. searched: seconds that it took to find the MPI.
    """

    wanted: Settings
    mpi: Mpi
    prefixes: Prefixes
    environ: Mapping[str, str]
    begun: float
    searched: float

    def command(self, job: Job) -> Command:
        """The command of this job. Raises UsageError."""
        return compose(self.wanted, self.mpi, replace(job, launched=self.begun), self.environ)


def _plan(options: argparse.Namespace) -> Plan:
    """Read the command line, and look for the MPI. Raises UsageError."""
    begun, begin = time.time(), time.monotonic()
    _find_home()
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the current folder has been removed: change to one that exists") from error
    mpi = find_mpi(os.environ, os.environ.get("HVDLITE_MPIEXEC"))
    searched = time.monotonic() - begin
    wanted, explanations = settings(options, mpi, os.environ)
    for line in explanations:
        say(line)
    prefixes = Prefixes(options.prefix, options.timestamps, wanted.ranks)
    if not wanted.step:  # whose output comes in whole lines
        live = options.prefix is not Style.NONE and options.output_filename is None
        told = terminal.variables(os.environ, max(prefixes.width(1), prefixes.width(2)), live)
        wanted = replace(wanted, env={**told, **wanted.env})
    environ = {**kept(os.environ), **forwarded(os.environ)} if wanted.elsewhere else os.environ
    return Plan(wanted, mpi, prefixes, environ, begun, searched)


def _dry_run(options: argparse.Namespace) -> int:
    """Print the command to stdout, and start nothing. Returns hvdliterun's exit code. Raises UsageError."""
    with _environment_as_before():
        plan, job = _plan(options), new_job()
        command = plan.command(job)
        if options.verbose:
            _show_libraries(plan.mpi, command, plan.wanted)
        return _write(shown.command(command, plan.wanted, job) + "\n")


def _write(text: str) -> int:
    """Write to stdout. Returns hvdliterun's exit code. Raises UsageError."""
    try:
        write_all(1, os.fsencode(text))  # arguments may be any bytes
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OSError as error:
        raise UsageError(f"stdout: {error.strerror}", 1) from error
    return 0


def _launch(options: argparse.Namespace, task: bytes | None, agent: subprocess.Popen[bytes]) -> Outcome:
    plan = _plan(options)
    wanted = plan.wanted
    if task is not None and wanted.step and len(wanted.hosts) > 1:
        cure = "give hosts=... to have them reached by ssh, or start a script with hvdliterun"
        raise UsageError(f"hvdlite.run cannot use {wanted.step.starter.value} for several hosts: {cure}")

    def prepare(job: Job) -> Command:
        command = plan.command(job)
        if options.verbose:
            _show_libraries(plan.mpi, command, wanted)
            say(f"command:\n{shown.command(command, wanted, job)}")
        return command

    with contextlib.ExitStack() as files:
        printer = Printer(plan.prefixes, options.output_filename)
        try:
            files.enter_context(printer)
        except OSError as error:
            raise UsageError(f"--output-filename {error.filename}: {error.strerror or error}") from error
        outcome = run(prepare, wanted, plan.environ, Streams(printer, options.verbose), agent, task)
    if outcome.summary:
        with contextlib.suppress(OSError):
            print(outcome.summary.removesuffix("\n"), file=sys.stderr, flush=True)
    if options.verbose:
        _show_times(plan.searched, outcome)
    if outcome.message and printer.without_hvdlite:
        return replace(outcome, message=outcome.message + _other_python(wanted.command[0]))
    return outcome


def _other_python(program: str) -> str:
    """An addition to the message about a job whose Python has no hvdlite; empty if hvdliterun runs on that Python."""
    path = shutil.which(program) or program
    if os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable):
        return ""
    return f". {path} has no hvdlite. Start the script with {sys.executable}, which has it [HVD005]"


@contextlib.contextmanager
def _environment_as_before() -> Iterator[None]:
    """At the end `_find_home` is undone, for notebooks that call `hvdlite.run`."""
    had = "HOME" in os.environ
    try:
        yield
    finally:
        if not had:
            os.environ.pop("HOME", None)


def _show_libraries(mpi: Mpi, command: Command, wanted: Settings) -> None:
    say(f"MPI: {mpi}")
    say(f"libmpi: {_libmpi(wanted.command[0], {**os.environ, **command.env})}")


def _libmpi(program: str, env: Mapping[str, str]) -> str:
    """The MPI library that mpi4py loads in the command's interpreter. A child finds out, without MPI_Init."""
    try:
        child = facts.questions([program], env) or facts.questions([sys.executable], env) or []
        null = subprocess.DEVNULL
        answer = subprocess.run(child, env=env, capture_output=True, text=True, timeout=LIBRARY_ANSWERS, stdin=null)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    said = answer.stderr.strip().splitlines() or ["no answer"]
    return facts.answers(answer.stdout).get("MPI") or f"unknown ({said[-1]})"


def _show_times(found: float, outcome: Outcome) -> None:
    first = "none" if outcome.first_output is None else f"after {outcome.first_output * 1e3:.0f} ms"
    say(
        f"start-up: find MPI {found * 1e3:.0f} ms, prepare {outcome.prepared * 1e3:.0f} ms, "
        f"spawn {outcome.spawned * 1e3:.0f} ms, first output {first}"
    )


def _open_stdio() -> None:
    """Open closed standard streams, so that no pipe gets one of their descriptors."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 2:
        descriptor = os.dup(descriptor)
    if descriptor > 2:
        os.close(descriptor)


def say(text: str) -> None:
    """Print a line of hvdliterun to stderr. If that cannot be written, the exit code does not change."""
    with contextlib.suppress(OSError):
        print(f"hvdliterun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
