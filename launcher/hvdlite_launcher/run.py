"""Runs one job: starts the MPI's launcher, carries output, and ends the job when anything has ended.

One thread, one loop, woken by output, by other hosts, by a signal to hvdliterun, and by the end of mpirun. mpirun has a
session of its own, so that a terminal's Ctrl-C reaches hvdliterun alone, which then ends the job in steps (`ending`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdlite_launcher.command import Command, Place, Settings
from hvdlite_launcher.ending import Ending, Suspension, signals, suspension
from hvdlite_launcher.entry import deserter, entry, inside
from hvdlite_launcher.environment import LOGIN
from hvdlite_launcher.failures import ABSENT, DESERTED, Failures, of_scheduler
from hvdlite_launcher.lending import lending
from hvdlite_launcher.output import Printer
from hvdlite_launcher.place import a_place, first_failure, left_by_ranks, room
from hvdlite_launcher.ranks import publish
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team, a_team

_STARTS = 3  # times as long as hosts may take to be ready may the first rank take to start


@dataclass(frozen=True)
class Outcome:
    """How a job ended. code: the exit code for hvdliterun. message: the line that explains it, or None.

    signal: what hvdliterun was sent to end it, or 0. ranks: how many there were. rank: the first that failed, or None.
    results: by rank, what ranks have left in `result.RANK` in the job's folder. prepared, spawned: seconds for
    composing the command (and reaching other hosts) and for starting it. first_output: seconds from that start to a
    rank's first output; None where nothing was written.
    """

    code: int
    message: str | None
    signal: int
    ranks: int
    rank: int | None
    results: Mapping[int, bytes]
    prepared: float
    spawned: float
    first_output: float | None


def run(
    compose: Callable[[Place], Command],
    settings: Settings,
    environ: Mapping[str, str],
    *,
    printer: Printer,
    verbose: bool = False,
    task: bytes | None = None,
) -> Outcome:
    """Run one job from its start to the last trace of it; output and errors go to our stdout and stderr.

    compose: makes the command, given the job's place. environ: what the command's variables are added to.
    verbose: whether all of mpirun's messages are shown. task: contents of the file `task` that ranks find in the job's
    folder, or None.
    Raises NotReadyError before anything has started when some host cannot take part.
    """
    failures = Failures(several=settings.elsewhere)
    streams = Streams(printer, verbose, hear=lambda line: failures.add(of_scheduler(line.decode(errors="replace"))))
    ending = Ending(failures)
    with contextlib.closing(streams), signals(ending, streams):
        with a_place(several=settings.elsewhere) as place:
            begun = time.monotonic()
            with room(place.folder):
                streams.open_ranks(place, settings.ranks)
                if task is not None:
                    publish(place.folder, "task", task)
            command = compose(place)
            env = {**environ, **command.env}
            job = _job(place, settings, env)
            with a_team(settings, place, job, task, streams, failures) as team, suspension(team) as pause:

                def stop() -> bool:
                    pause.act()
                    return ending.signal != 0

                if settings.several:
                    team.prepare(settings, job, stop)
                    ending.patience = _STARTS * settings.start_timeout
                started = time.monotonic()
                with lending(place, settings, streams, wanted=task is None) as lent:
                    mpirun = _spawn(command, env, streams, lent)
                    spawned = time.monotonic() - started
                    _watch(mpirun, place, team, streams, ending, pause)
                if mpirun.returncode and not ending.signal and not failures.any:
                    ending.lost = ending.lost or team.lost()  # its agent may have ended the MPI's daemon there
            missing = _missing(settings, place, team)
            failures.add(first_failure(place))
            failures.add(deserter({"": entry(place.folder)}, 0.0))
            failure = failures.first(final=True)
            beginning = failure is not None and not failure.host and inside(place.folder, failure.rank)
            found: dict[int, bytes] = {}
            notes = left_by_ranks(place, "swallowed")
            swallowed = {rank: text.decode(errors="replace") for rank, text in notes.items()}
            for remote in team.remotes:
                found |= remote.results
                swallowed |= remote.swallowed
            found |= left_by_ranks(place, "result")
        streams.drain(explained=bool(ending.signal or ending.lost or failure))
        code, message = _explain(mpirun, ending, streams.broken, beginning, missing)
        if not code and swallowed:
            code, message = 1, _tell_swallowed(swallowed)
    first = streams.first_output
    waited = None if first is None else first - started
    first_rank = None if failure is None else failure.rank
    return Outcome(code, message, ending.signal, settings.ranks, first_rank, found, started - begun, spawned, waited)


def _job(place: Place, settings: Settings, env: Mapping[str, str]) -> dict[str, object]:
    """What agents must know."""
    folders = {"folder": place.root, "shared": place.shared, "cwd": os.getcwd()}
    theirs = {name: value for name, value in env.items() if name not in LOGIN or name in settings.env}
    wanted = {"command": settings.command, "interfaces": settings.interfaces, "patience": settings.host_timeout}
    return {"id": place.id, **folders, **wanted, "env": theirs}


def _spawn(command: Command, env: Mapping[str, str], streams: Streams, lent: bool) -> subprocess.Popen[bytes]:
    """Start the MPI's launcher. lent: whether rank 0 gets our stdin by itself."""
    labelled, stdin = command.labelled, subprocess.DEVNULL if lent else None
    out = streams.open_labelled(1) if labelled else streams.open_notices()
    err = streams.open_labelled(2) if labelled else os.dup(out)
    try:
        return subprocess.Popen(command.argv, env=env, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
    finally:
        os.close(out)
        os.close(err)


def _watch(
    mpirun: subprocess.Popen[bytes], place: Place, team: Team, streams: Streams, ending: Ending, pause: Suspension
) -> None:
    while mpirun.poll() is None:
        streams.wait()
        pause.act()
        if streams.broken and not ending.signal:
            ending.on_signal(signal.SIGPIPE)
        if ending.press(mpirun, place, team):
            mpirun.kill()


def _missing(settings: Settings, place: Place, team: Team) -> bool:
    """Whether ranks have not ended, though mpirun has: Open MPI's is content where a daemon of its own has crashed on
    another host. (Ranks may be where we do not watch, if a scheduler or --mpi-args have put them there.)"""
    ended = sum(name.startswith("ended.") for name in os.listdir(place.folder))
    ended += sum(remote.finished for remote in team.remotes)
    return ended < settings.ranks and not settings.step and not settings.mpi_args


def _explain(
    mpirun: subprocess.Popen[bytes], ending: Ending, broken: OSError | None, beginning: bool, missing: bool
) -> tuple[int, str | None]:
    """beginning: the rank that failed was in hvd.init(), where MPIs take shared memory and some look not whether there
    is any. missing: ranks have not ended, or not begun."""
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
        host = failure.host or (os.uname().nodename if ending.failures.several else "")
        rank = f"rank {failure.rank} on {host}" if host else f"rank {failure.rank}"
        if failure.signal == ABSENT:
            return failure.code, f"{rank} ended without hvd.init(), in which other ranks wait for it"
        if failure.signal == DESERTED:
            return failure.code, f"{rank} ended without hvd.shutdown() (os._exit?), and the others need it"
        if failure.signal:
            how = f"{_name(failure.signal)} (signal {failure.signal})"
            memory = failure.signal == signal.SIGBUS or (failure.signal == signal.SIGSEGV and beginning)
            why = ": /dev/shm may be full, or too small (df /dev/shm)" if memory else ""
            return failure.code, f"{rank} was killed by {how}{why}"
        return failure.code, f"{rank} ended the job with exit code {failure.code}"
    if mpirun.returncode < 0:
        number = -mpirun.returncode
        why = ": TMPDIR may be full" if number == signal.SIGBUS else ""
        return 128 + number, f"the MPI's launcher was killed by {_name(number)} (signal {number}){why}"
    if mpirun.returncode:
        when = " before any rank started" if ending.patience < math.inf and not ending.begun else ""
        return mpirun.returncode, f"the MPI's launcher ended with exit code {mpirun.returncode}{when}"
    if missing:
        return 1, "the MPI's launcher ended with exit code 0 before all ranks had ended"
    return 0, None


def _tell_swallowed(errors: Mapping[int, str]) -> str:
    """errors: what ranks were told when another had left, which their script has caught, by rank."""
    who = ("rank " if len(errors) == 1 else "ranks ") + ", ".join(map(str, sorted(errors)))
    first = "".join(filter(str.isprintable, errors[min(errors)].partition("\n")[0]))
    return (
        f"{who} ended with exit code 0 after hvdlite's communication had failed, so the ranks have not done the same: "
        f"{first} (The script has caught this error: does an `except RuntimeError:` stand around a batch?)"
    )


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
