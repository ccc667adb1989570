"""How a job is brought to its end, in steps: by a signal to hvdliterun, a rank's failure, or the loss of a host.

The ranks get the signal itself (SIGINT: in Python, KeyboardInterrupt) and time to save what they want to keep; then
mpirun gets SIGTERM, and soon after the janitors kill what is left. The last two steps follow a rank's failure too, a
second after it, should mpirun not end the others by itself; and a host's loss at once, since mpirun may wait for that
host for minutes.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from hvdlite_launcher.command import Place
from hvdlite_launcher.entry import SETTLED, deserter, entry
from hvdlite_launcher.failures import Failures
from hvdlite_launcher.janitor import rank_processes, send
from hvdlite_launcher.place import first_failure
from hvdlite_launcher.ranks import Farewell, publish
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team

SIGNAL_GRACE = 5.0  # seconds that the ranks have to end by themselves after a signal, as Horovod's have
RANKS_GRACE = 1.2  # the same after one has failed; Open MPI 4's mpirun crashes when told to end while it ends a job
ENTRY_PATIENCE = 5.0  # seconds that a rank may be in hvd.init() after another has ended
MPIRUN_GRACE = 0.4  # seconds that mpirun then has to end them
_PAUSING = 0.5  # seconds to tell other hosts of a suspension


@dataclass
class Ending:
    """Why and since when a job is being ended.

    signal: what hvdliterun was sent, or 0. lost: which host was lost, and how; or None. failures: of ranks.
    patience: seconds for the first rank to start. begun: whether one has. messages: signals to be passed on.
    """

    failures: Failures
    signal: int = 0
    lost: str | None = None
    hurried: bool = False
    patience: float = math.inf
    begun: bool = False
    messages: list[int] = field(default_factory=list)
    _farewell: Farewell = field(default_factory=Farewell)
    _born: float = field(default_factory=time.monotonic)
    _next_roll: float = 0.0
    _since: float | None = None
    _told_mpirun: bool = False
    _told_ranks: bool = False

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """A signal handler: the first signal ends the job, the second at once."""
        self.hurried = self.signal != 0
        self.signal = self.signal or number

    def on_message(self, number: int, frame: FrameType | None) -> None:
        """A signal handler: the signal means something to the ranks, and ends nothing."""
        self.messages.append(number)

    def press(self, mpirun: subprocess.Popen[bytes], place: Place, team: Team) -> bool:
        """Take the next step towards the end, if it is time; True when all that is left is killing."""
        now = time.monotonic()
        while self.messages:
            number = self.messages.pop(0)
            send(rank_processes(place.folder), number)
            team.signal(number)
        self._look(place, team)
        if self._since is None:
            if self.signal:
                self._since = now
                with contextlib.suppress(OSError):
                    publish(place.folder, "ending", b"")
                self._told_mpirun = not self._farewell.say(place.folder, self._sent) | team.signal(self._sent)
                if self._told_mpirun:  # no rank has started yet
                    self._since = now + RANKS_GRACE
                    send([mpirun.pid], signal.SIGTERM)
            elif self.lost:
                self._since = now - RANKS_GRACE
            elif self.failures.first():
                self._since = now
            return False
        grace = RANKS_GRACE
        if self.signal and not self.lost:
            ranks = self._farewell.say(place.folder, self._sent)
            grace = SIGNAL_GRACE if ranks or team.running else 0.0
        if not self._told_mpirun and now - self._since > grace:
            self._told_mpirun, self._since = True, now
            send([mpirun.pid], signal.SIGTERM)
        return self.hurried or (self._told_mpirun and now - self._since > MPIRUN_GRACE)

    @property
    def _sent(self) -> int:
        """What ranks get. Not SIGHUP, which UCX takes as a wish for its debug log; SIGPIPE is our own affair."""
        return signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM

    def _look(self, place: Place, team: Team) -> None:
        """Note failures; let the ranks on all hosts know whose is the first: only that one is told."""
        self.failures.add(first_failure(place))
        if time.monotonic() > self._next_roll:
            self._next_roll = time.monotonic() + 1.0
            entries = {"": entry(place.folder, SETTLED), **{remote.name: remote.entry for remote in team.remotes}}
            self.failures.add(deserter(entries, ENTRY_PATIENCE))
        first = self.failures.first()
        if first and team.remotes and not self._told_ranks:
            self._told_ranks = True
            with contextlib.suppress(OSError):
                publish(place.folder, "told", str(first.rank).encode())
            team.say(told=first.rank)
        if not first and not self.lost:
            self.lost = team.lost()
        if not self.begun and self.patience < math.inf:
            self.begun = bool(rank_processes(place.folder)) or any(remote.started for remote in team.remotes)
            if not self.begun and time.monotonic() - self._born > self.patience:
                self.lost = self.lost or (
                    f"no rank has started within {self.patience:.0f} s: the MPI's daemons do not reach each other (a "
                    "firewall?). Name the network that all hosts share with --network-interfaces; -v shows what it says"
                )


@contextmanager
def signals(ending: Ending, streams: Streams) -> Iterator[None]:
    """Note SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 (unless ignored, as under nohup), and wake for them and for
    SIGCHLD.

    Python allows it in the main thread only; elsewhere nothing is noted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    streams.add(os.dup(awake), lambda data: None)  # only to wake it
    acts: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), ending.on_signal),
        **dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), ending.on_message),
    }
    wanted = [number for number in acts if signal.getsignal(number) is not signal.SIG_IGN]
    previous_wake = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    previous = {number: signal.signal(number, acts[number]) for number in wanted}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(previous_wake)
        os.close(wake)
        os.close(awake)  # last: until then a signal may come


@dataclass
class Suspension:
    """While hvdliterun is suspended (Ctrl-Z), other hosts must not take its silence for its death.

    wanted: whether it is to be suspended. A signal's handler does no more than note that: the thread that it interrupts
    may be in the middle of a message to those hosts.
    """

    team: Team
    wanted: bool = False

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.wanted = True

    def act(self) -> None:
        """Stop here, if that is wanted, until somebody lets us go on."""
        if not self.wanted:
            return
        self.wanted = False
        with self.team.quiet:  # a sign of life would end the pause
            self.team.say(pause=1)
            self.team.flush(_PAUSING)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # stops here; what follows happens after SIGCONT
            signal.signal(signal.SIGTSTP, self.on_signal)
            self.team.forgive()


@contextmanager
def suspension(team: Team) -> Iterator[Suspension]:
    """Where there are other hosts, Ctrl-Z is noted; whoever waits then lets it `act`."""
    suspension = Suspension(team)
    if not team.remotes or threading.current_thread() is not threading.main_thread():
        yield suspension
        return
    previous = signal.signal(signal.SIGTSTP, suspension.on_signal)
    try:
        yield suspension
    finally:
        signal.signal(signal.SIGTSTP, previous)
