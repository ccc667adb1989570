"""Runs one job: starts the MPI's launcher, carries output, and ends the job when anything has ended.

One thread, one loop, woken by output, by a signal to hvdliterun, and by the end of mpirun. mpirun has a
session of its own, so that a terminal's Ctrl-C reaches hvdliterun alone, which then ends the job in
steps: the ranks get the signal itself (SIGINT: in Python, KeyboardInterrupt), a second later mpirun gets SIGTERM,
and soon after the janitor kills what is left. The last two steps follow a rank's failure too, should
mpirun not end the others by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from hvdlite_launcher.command import Command, Place
from hvdlite_launcher.output import Printer
from hvdlite_launcher.place import Failure, a_place, first_failure, rank_processes
from hvdlite_launcher.streams import Streams

RANKS_GRACE = 0.9  # seconds that the ranks have to end by themselves
MPIRUN_GRACE = 0.4  # seconds that mpirun then has to end them


@dataclass(frozen=True)
class Outcome:
    """How a job ended. code: the exit code for hvdliterun. message: the line that explains it, or None.

    prepared, spawned: seconds for composing the command and for starting it. first_output: seconds from
    that start to a rank's first output; None where nothing was written.
    """

    code: int
    message: str | None
    prepared: float
    spawned: float
    first_output: float | None


@dataclass
class Ending:
    """Why and since when a job is being ended. signal: what hvdliterun was sent, or 0."""

    signal: int = 0
    since: float | None = None
    hurried: bool = False
    _told_mpirun: bool = False

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """A signal handler: the first signal ends the job, the second at once."""
        self.hurried = self.signal != 0
        self.signal = self.signal or number

    def press(self, mpirun: subprocess.Popen[bytes], place: Place) -> bool:
        """Take the next step towards the end, if it is time; True when all that is left is killing."""
        now = time.monotonic()
        if self.since is None:
            if self.signal:
                self.since = now
                # Not SIGHUP, which UCX takes as a wish for its debug log; SIGPIPE is our own affair.
                number = signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM
                self._told_mpirun = not _send(rank_processes(place), number)
                if self._told_mpirun:  # no rank has started yet
                    _send([mpirun.pid], signal.SIGTERM)
            elif first_failure(place):
                self.since = now
            return False
        if not self._told_mpirun and now - self.since > RANKS_GRACE:
            self._told_mpirun = True
            _send([mpirun.pid], signal.SIGTERM)
        return self.hurried or now - self.since > RANKS_GRACE + MPIRUN_GRACE


def run(
    compose: Callable[[Place], Command],
    ranks: int,
    environ: Mapping[str, str],
    *,
    prefix: bool = True,
    verbose: bool = False,
) -> Outcome:
    """Run one job from its start to the last trace of it; output and errors go to our stdout and stderr.

    compose: makes the command, given the job's place. environ: what the command's variables are added to.
    prefix: whether lines carry their rank. verbose: whether all of mpirun's messages are shown.
    """
    streams, ending = Streams(Printer(prefix), verbose), Ending()
    with _signals(ending, streams):
        with a_place() as place:
            begun = time.monotonic()
            streams.open_ranks(place, ranks)
            command = compose(place)
            started = time.monotonic()
            mpirun = _spawn(command, environ, streams)
            spawned = time.monotonic() - started
            _watch(mpirun, place, streams, ending)
            failure = first_failure(place)
        streams.drain(explained=bool(ending.signal or failure))
        code, message = _explain(mpirun, ending.signal, failure)
    first = streams.first_output
    waited = None if first is None else first - started
    return Outcome(code, message, started - begun, spawned, waited)


def _spawn(command: Command, environ: Mapping[str, str], streams: Streams) -> subprocess.Popen[bytes]:
    end = streams.open_notices()
    env = {**environ, **command.env}
    try:
        return subprocess.Popen(command.argv, env=env, stdout=end, stderr=end, start_new_session=True)
    finally:
        os.close(end)


def _watch(mpirun: subprocess.Popen[bytes], place: Place, streams: Streams, ending: Ending) -> None:
    while mpirun.poll() is None:
        streams.wait()
        if streams.broken and not ending.signal:
            ending.on_signal(signal.SIGPIPE)
        if ending.press(mpirun, place):
            mpirun.kill()


def _send(processes: Sequence[int], number: int) -> bool:
    """Send a signal to all; whether there was any process."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)
    return bool(processes)


@contextmanager
def _signals(ending: Ending, streams: Streams) -> Iterator[None]:
    """Note SIGINT, SIGTERM and SIGHUP (unless ignored, as under nohup), and wake for them and for SIGCHLD.

    Python allows it in the main thread only; elsewhere nothing is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    streams.add(awake, None)
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    wanted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    previous_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, ending.on_signal) for number in wanted}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wake)
        os.close(wake)


def _explain(
    mpirun: subprocess.Popen[bytes], received: int, failure: Failure | None
) -> tuple[int, str | None]:
    if received:
        quiet = received in (signal.SIGINT, signal.SIGPIPE)
        return 128 + received, None if quiet else f"ended by {_name(received)}"
    if failure and failure.signal:
        how = f"{_name(failure.signal)} (signal {failure.signal})"
        return failure.code, f"rank {failure.rank} was killed by {how}"
    if failure:
        return failure.code, f"rank {failure.rank} ended the job with exit code {failure.code}"
    if mpirun.returncode < 0:
        number = -mpirun.returncode
        return 128 + number, f"the MPI's launcher was killed by {_name(number)} (signal {number})"
    return mpirun.returncode, None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
