"""Runs one job: starts the MPI's launcher, prints what the agents send, and ends the job.

One thread waits in one loop. Output, messages of agents, signals to hvdliterun and the end of mpirun wake it. mpirun
runs in a session of its own: Ctrl-C in a terminal reaches hvdliterun alone, which then ends the job in steps
(`ending`).
"""

import contextlib
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdlite_launcher import UsageError
from hvdlite_launcher.command import Command, Job, Settings
from hvdlite_launcher.ending import Ending, signals
from hvdlite_launcher.failures import ABSENT, DESERTED, Failures, of_scheduler
from hvdlite_launcher.lending import lending
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team, a_team
from hvdlite_launcher.times import FIRST_RANK

_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    code: the exit code of hvdliterun. message: the line that explains it, or None. signal: the signal that ended the
    job, or 0. ranks: the number of ranks. rank: the rank that failed first, or None. results: by rank, the contents of
    `result.RANK` in the job's folder. summary: the contents of `summary.0` there, or "". prepared: seconds until all
    hosts were ready. spawned: seconds for starting mpirun. first_output: seconds from then to the first output of a
    rank, or None if no rank has written.
    """

    code: int
    message: str | None
    signal: int
    ranks: int
    rank: int | None
    results: Mapping[int, bytes]
    summary: str
    prepared: float
    spawned: float
    first_output: float | None


def run(
    compose: Callable[[Job], Command],
    settings: Settings,
    environ: Mapping[str, str],
    streams: Streams,
    own_agent: subprocess.Popen[bytes],
    task: bytes | None = None,
) -> Outcome:
    """Run one job, and return when nothing of it is left.

    compose: makes the job's command. environ: variables to which the command's are added. streams: prints all output.
    own_agent: the agent of this host. task: the contents of the file `task` in the job's folder, or None.
    Raises UsageError, and NotReadyError if a host cannot take part; nothing has started then.
    """
    begun, job, failures = time.monotonic(), new_job(), Failures(several=settings.elsewhere)
    ending = Ending(failures, patience=FIRST_RANK * settings.start_timeout if settings.several else math.inf)
    with contextlib.closing(streams), signals(ending, streams, settings.several):
        team = Team(settings, job, streams, failures, own_agent)
        command = compose(job)
        env = {**environ, **command.env}
        with a_team(team, env, task):

            def stop() -> bool:
                ending.suspend(team)
                return ending.signal != 0

            returned, spawned, ready = 0, 0.0, team.prepare(stop)
            started = time.monotonic()
            if ready:
                with lending(job, settings, streams, wanted=task is None) as lent:
                    mpirun = _spawn(command, env, streams, lent, failures)
                    spawned = time.monotonic() - started
                    returned = _watch(mpirun, team, streams, ending)
            if returned and not ending.signal and not failures.any:
                ending.lose(team.lost())  # the agent of that host may have killed the MPI's daemon
        failures.add(team.deserter(0.0))
        failure = failures.first(final=True)
        streams.drain(explained=bool(ending.signal or ending.lost or failure))
        # Open MPI's launcher ends with 0 if its daemon on another host has crashed. A scheduler or --mpi-args may have
        # put ranks on hosts without an agent.
        missing = team.finished < settings.ranks and not settings.step and not settings.mpi_args
        code, message = _explain(returned, ending, streams.broken, missing)
        swallowed = {rank: text for each in team.members for rank, text in each.report.swallowed.items()}
        if not code and swallowed:
            code, message = 1, _tell_swallowed(swallowed)
    results = {rank: data for each in team.members for rank, data in each.report.results.items()}
    summary = next(filter(None, (each.report.summary for each in team.members)), "")
    first = streams.first_output
    waited = None if first is None else first - started
    first_rank = None if failure is None else failure.rank
    times = (started - begun, spawned, waited)
    return Outcome(code, message, ending.signal, settings.ranks, first_rank, results, summary, *times)


def new_job() -> Job:
    """A job with a new name; its folders are not made yet. Raises UsageError if there is no folder for them."""
    name = f"hvdlite-{secrets.token_hex(6)}"
    try:
        folder = os.path.join(os.path.abspath(tempfile.gettempdir()), name)
    except FileNotFoundError as error:
        raise UsageError(f"{error.strerror}: free some room there, or name a folder in TMPDIR", 1) from error
    shared = os.path.join(_SHARED_MEMORY, name) if _has_room(_SHARED_MEMORY) else None
    return Job(name, folder, shared, _script("keeper"), _script("bourne"))


def _has_room(folder: str) -> bool:
    """Whether this user can make a folder there."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK) and found.f_bavail > 0 and (found.f_favail > 0 or not found.f_files)


def _script(name: str) -> tuple[str, ...]:
    here = os.path.dirname(os.path.abspath(__file__))
    return (sys.executable, "-I", "-S", os.path.join(here, f"{name}.py"))


def _spawn(
    command: Command, env: Mapping[str, str], streams: Streams, lent: bool, failures: Failures
) -> subprocess.Popen[bytes]:
    """Start the MPI's launcher. lent: whether rank 0 takes hvdliterun's stdin from `lending`."""

    def hear(line: bytes) -> None:
        failures.add(of_scheduler(line.decode(errors="replace")))

    labelled, stdin = command.labelled, subprocess.DEVNULL if lent else None
    out = streams.open_labelled(1, hear) if labelled else streams.open_notices()
    err = streams.open_labelled(2, hear) if labelled else os.dup(out)
    try:
        return subprocess.Popen(command.argv, env=env, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
    finally:
        os.close(out)
        os.close(err)


def _watch(mpirun: subprocess.Popen[bytes], team: Team, streams: Streams, ending: Ending) -> int:
    """Wait for the end of mpirun, and bring it about. Returns what mpirun has returned."""
    while (returned := mpirun.poll()) is None:
        streams.wait()
        ending.suspend(team)
        if streams.broken and not ending.signal:
            ending.on_signal(signal.SIGPIPE)
        if ending.advance(mpirun, team):
            mpirun.kill()
    return returned


def _explain(returned: int, ending: Ending, broken: OSError | None, missing: bool) -> tuple[int, str | None]:
    """The exit code, and the line that explains it.

    returned: by mpirun. broken: why hvdliterun's output cannot be written. missing: fewer ranks have ended than there
    should be.
    """
    received, failure = ending.signal, ending.failures.first(final=True)
    if received:
        if received == signal.SIGPIPE and broken and not isinstance(broken, BrokenPipeError):
            where = f": {broken.filename}" if broken.filename else ""
            return 1, f"the ranks' output cannot be written: {broken.strerror}{where}"
        quiet = received in (signal.SIGINT, signal.SIGPIPE)
        return 128 + received, None if quiet else f"ended by {_name(received)}"
    if ending.lost:
        return 128 + signal.SIGKILL if ending.begun else 1, ending.lost
    if failure:
        rank = f"rank {failure.rank} on {failure.host}" if ending.failures.several else f"rank {failure.rank}"
        if failure.signal == ABSENT:
            return (
                failure.code,
                f"{rank} ended without hvd.init(), where other ranks wait: every rank must call hvd.init() [HVD906]",
            )
        if failure.signal == DESERTED:
            told = (
                "ended without hvd.shutdown(), while other ranks still communicated: call it first (os._exit does "
                "not) [HVD907]"
            )
            return failure.code, f"{rank} {told}"
        if failure.signal:
            how = f"{_name(failure.signal)} (signal {failure.signal})"
            # In hvd.init() MPIs take shared memory, and some do not look whether there is any.
            memory = failure.signal == signal.SIGBUS or (failure.signal == signal.SIGSEGV and failure.inside)
            why = ": /dev/shm may be full, or too small (df /dev/shm) [HVD905]" if memory else " [HVD904]"
            return failure.code, f"{rank} was killed by {how}{why}"
        return failure.code, f"{rank} ended the job with exit code {failure.code} [HVD903]"
    if returned < 0:
        number = -returned
        why = ": TMPDIR may be full" if number == signal.SIGBUS else ""
        return 128 + number, f"the MPI's launcher was killed by {_name(number)} (signal {number}){why} [HVD019]"
    if returned:
        when = " before any rank started" if ending.patience < math.inf and not ending.begun else ""
        return returned, f"the MPI's launcher ended with exit code {returned}{when} [HVD019]"
    if missing:
        why = "its daemon on a host may have crashed"
        return 1, f"the MPI's launcher ended with exit code 0 before all ranks had ended: {why} [HVD019]"
    return 0, None


def _tell_swallowed(errors: Mapping[int, str]) -> str:
    """The message about scripts that caught the error raised when another rank had left. errors: by rank."""
    who = ("rank " if len(errors) == 1 else "ranks ") + ", ".join(map(str, sorted(errors)))
    first = "".join(filter(str.isprintable, errors[min(errors)].partition("\n")[0]))
    first = re.sub(r" \[HVD\d+\]$", "", first).rstrip(".")  # this message has a code, too
    cure = "Let it end the script: does an `except RuntimeError:` stand around a batch?"
    return f"the script on {who} has caught hvdlite's error and gone on: {first}. {cure} [HVD908]"


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
