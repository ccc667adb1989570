"""How a job is brought to its end, in steps: by a signal to hvdliterun, a rank's failure, or the loss of a host.

The ranks get the signal itself (SIGINT: in Python, KeyboardInterrupt), a second later mpirun gets SIGTERM, and soon
after the janitors kill what is left. The last two steps follow a rank's failure too, should mpirun not end the others
by itself; and a host's loss at once, since mpirun may wait for that host for minutes.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from hvdlite_launcher.command import Place
from hvdlite_launcher.failures import Failures
from hvdlite_launcher.place import first_failure, rank_processes, tell_first
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team

RANKS_GRACE = 0.9  # seconds that the ranks have to end by themselves
MPIRUN_GRACE = 0.4  # seconds that mpirun then has to end them


@dataclass
class Ending:
    """Why and since when a job is being ended.

    signal: what hvdliterun was sent, or 0. lost: which host was lost, and how; or None. failures: of ranks.
    patience: seconds for the first rank to start. begun: whether one has.
    """

    failures: Failures
    signal: int = 0
    lost: str | None = None
    hurried: bool = False
    patience: float = math.inf
    begun: bool = False
    _born: float = field(default_factory=time.monotonic)
    _since: float | None = None
    _told_mpirun: bool = False
    _told_ranks: bool = field(default=False, repr=False)

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """A signal handler: the first signal ends the job, the second at once."""
        self.hurried = self.signal != 0
        self.signal = self.signal or number

    def press(self, mpirun: subprocess.Popen[bytes], place: Place, team: Team) -> bool:
        """Take the next step towards the end, if it is time; True when all that is left is killing."""
        now = time.monotonic()
        self._look(place, team)
        if self._since is None:
            if self.signal:
                self._since = now
                # Not SIGHUP, which UCX takes as a wish for its debug log; SIGPIPE is our own affair.
                number = signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM
                self._told_mpirun = not (_send(rank_processes(place), number) | team.signal(number))
                if self._told_mpirun:  # no rank has started yet
                    _send([mpirun.pid], signal.SIGTERM)
            elif self.lost:
                self._since = now - RANKS_GRACE
            elif self.failures.first():
                self._since = now
            return False
        if not self._told_mpirun and now - self._since > RANKS_GRACE:
            self._told_mpirun = True
            _send([mpirun.pid], signal.SIGTERM)
        return self.hurried or now - self._since > RANKS_GRACE + MPIRUN_GRACE

    def _look(self, place: Place, team: Team) -> None:
        """Note failures; let the ranks on all hosts know whose is the first: only that one is told."""
        self.failures.add(first_failure(place))
        first = self.failures.first()
        if first and team.remotes and not self._told_ranks:
            self._told_ranks = True
            tell_first(place, first.rank)
            team.say(told=first.rank)
        if not first and not self.lost:
            self.lost = team.lost()
        if not self.begun and self.patience < math.inf:
            self.begun = bool(rank_processes(place)) or any(remote.started for remote in team.remotes)
            if not self.begun and time.monotonic() - self._born > self.patience:
                self.lost = self.lost or (
                    f"no rank has started within {self.patience:.0f} s: the MPI's daemons do not reach each other (a "
                    "firewall?). Name the network that all hosts share with --network-interfaces; -v shows what it says"
                )


@contextmanager
def signals(ending: Ending, streams: Streams) -> Iterator[None]:
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


@contextmanager
def suspension(team: Team) -> Iterator[None]:
    """While hvdliterun is suspended (Ctrl-Z), other hosts must not take its silence for its death."""
    if not team.remotes or threading.current_thread() is not threading.main_thread():
        yield
        return

    def suspend(number: int, frame: FrameType | None) -> None:
        team.say(pause=1)
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # stops here; what follows happens after SIGCONT
        signal.signal(number, suspend)
        team.forgive()

    previous = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, previous)


def _send(processes: Sequence[int], number: int) -> bool:
    """Send a signal to all; whether there was any process."""
    for process in processes:
        with contextlib.suppress(OSError):
            os.kill(process, number)
    return bool(processes)
