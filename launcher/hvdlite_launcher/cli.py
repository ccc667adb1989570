"""The command line of `hvdliterun`: reads it, checks what can be checked before the start, and runs.

Wrong use is one line and exit code 2; a command or an MPI that is not there, 127; hosts that are not ready, a table and
1, as for a --check that finds nothing ready. Options stand before the command; all behind its name belongs to it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from hvdlite_launcher import checks, facts, readiness
from hvdlite_launcher.command import Command, Place, Settings, compose
from hvdlite_launcher.environment import forwarded, is_secret, kept
from hvdlite_launcher.keeper import FILES
from hvdlite_launcher.options import USAGE, parse
from hvdlite_launcher.output import Printer
from hvdlite_launcher.probe import Mpi, find_mpi
from hvdlite_launcher.readiness import NotReadyError
from hvdlite_launcher.run import Outcome, run
from hvdlite_launcher.settings import settings
from hvdlite_launcher.usage import UsageError

_FILES = 256  # that this process may open beside the ranks' pipes


def main(argv: Sequence[str] | None = None) -> int:
    """Run `hvdliterun` with these arguments (default: the process's own); returns its exit code."""
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
    """Open MPI's mpirun does nothing without a HOME, which services and containers may lack."""
    if "HOME" not in os.environ:
        try:
            os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # a container's user without a name
            os.environ["HOME"] = "/"


def launch(options: argparse.Namespace, task: bytes | None = None) -> Outcome:
    """Run the job that the command line asks for. task: see `run.run`. Raises UsageError, NotReadyError."""
    with _environment_as_before():
        return _launch(options, task)


def _launch(options: argparse.Namespace, task: bytes | None) -> Outcome:
    begin = time.monotonic()
    _find_home()
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError("the current folder has been removed: change to one that exists") from error
    mpi = find_mpi(os.environ, os.environ.get("HVDLITE_MPIEXEC"))
    found = time.monotonic()
    wanted, explanations = settings(options, mpi, os.environ)
    for line in explanations:
        say(line)
    if task is not None and wanted.step and len(wanted.hosts) > 1:
        starter = wanted.step.starter.value
        cure = "name them (hosts=...) to have them reached by ssh, or start a script with hvdliterun"
        raise UsageError(f"{starter} brings no function to other hosts: {cure}")
    environ = {**kept(os.environ), **forwarded(os.environ)} if wanted.elsewhere else os.environ

    def prepare(place: Place) -> Command:
        command = compose(wanted, mpi, place, environ)
        if options.verbose:
            _show_command(mpi, command, wanted, place)
        return command

    with contextlib.ExitStack() as files:
        undo = files.enter_context(_files_for(wanted.ranks))
        printer = Printer(not options.no_prefix, options.timestamps, options.output_filename, wanted.ranks)
        try:
            files.enter_context(printer)
        except OSError as error:
            raise UsageError(f"--output-filename {error.filename}: {error.strerror or error}") from error
        outcome = run(prepare, wanted, {**environ, **undo}, printer=printer, verbose=options.verbose, task=task)
    if options.verbose:
        _show_times(found - begin, outcome)
    if outcome.message and printer.without_hvdlite:
        return replace(outcome, message=outcome.message + _other_python(wanted.command[0]))
    return outcome


def _other_python(program: str) -> str:
    """What to add to the message of a job whose Python had no hvdlite; nothing where it is the one we run on."""
    path = shutil.which(program) or program
    if os.path.dirname(os.path.abspath(path)) == os.path.dirname(sys.executable):
        return ""
    return f". {path} has no hvdlite, which is installed for {sys.executable}: activate its environment, or name it"


@contextlib.contextmanager
def _files_for(ranks: int) -> Iterator[dict[str, str]]:
    """Inside, this process may open the files it needs: each rank has two pipes. Yields a variable by which the ranks'
    keepers undo that, if anything was done."""
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * ranks + _FILES
    wanted = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    if before == resource.RLIM_INFINITY or before >= wanted:
        yield {}
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    try:
        yield {FILES: f"{before} {wanted}"}
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


@contextlib.contextmanager
def _environment_as_before() -> Iterator[None]:
    """For a notebook, whose environment is its own: what `_find_home` has added goes."""
    had = "HOME" in os.environ
    try:
        yield
    finally:
        if not had:
            os.environ.pop("HOME", None)


def _show_command(mpi: Mpi, command: Command, wanted: Settings, place: Place) -> None:
    """As a line for a shell: the folder in shared memory, without which MPIs fall back to the network, is made anew."""
    say(f"MPI: {mpi}")
    say(f"libmpi: {_libmpi(wanted.command[0], {**os.environ, **command.env})}")
    shown = {name: "..." if is_secret(name) else shlex.quote(value) for name, value in command.env.items()}
    assignments = " ".join(f"{name}={value}" for name, value in sorted(shown.items()))
    folder = f"mkdir -m 700 {place.shared} && " if place.shared in command.env.values() else ""
    say(f"command: {folder}{assignments} {shlex.join(command.argv)}")


def _libmpi(program: str, env: Mapping[str, str]) -> str:
    """What mpi4py of the command's interpreter loads, asked of a child that does not initialize MPI."""
    python = program if os.path.basename(program).startswith("python") else sys.executable
    code = facts.NOT_FROM_HERE + (
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
    say(
        f"start-up: find MPI {found * 1e3:.0f} ms, prepare {outcome.prepared * 1e3:.0f} ms, "
        f"spawn {outcome.spawned * 1e3:.0f} ms, first output {first}"
    )


def _open_stdio() -> None:
    """Give closed standard streams a descriptor, lest a pipe of ours be taken for one."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor < 2:
        descriptor = os.dup(descriptor)
    if descriptor > 2:
        os.close(descriptor)


def say(text: str) -> None:
    """One line of hvdliterun's own, to stderr, if that can be written: the exit code stays what it is."""
    with contextlib.suppress(OSError):
        print(f"hvdliterun: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
