"""Ends a job in steps, after a signal to hvdliterun, the failure of a rank, or the loss of a host.

After SIGINT the agents send SIGINT to the ranks, which raises KeyboardInterrupt in Python. After SIGTERM or SIGHUP they
send SIGTERM. The ranks then have SIGNAL_GRACE to save their work. After a failure mpirun has FAILURE_GRACE to end the
other ranks by itself. After the loss of a host there is no grace, because mpirun may wait for that host for minutes.
Then mpirun receives SIGTERM, and MPIRUN_GRACE later the job counts as ended: the agents kill all remaining processes.
`times` draws the steps.
"""

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

from hvdlite_launcher.failures import Failures
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.team import Team
from hvdlite_launcher.times import FAILURE_GRACE, INIT_PATIENCE, MPIRUN_GRACE, PAUSE_SENT, SIGNAL_GRACE


@dataclass
class Ending:
    """Why a job is being ended, since when, and which steps have been taken.

    failures: of ranks. signal: the first signal that hvdliterun received to end the job, or 0. lost: which host was
    lost, and how; or None. hurried: a second signal came. patience: seconds for the first rank to start. begun: a rank
    has started. messages: signals to forward to the ranks. suspended: Ctrl-Z asks to suspend hvdliterun.
    """

    failures: Failures
    signal: int = 0
    lost: str | None = None
    hurried: bool = False
    patience: float = math.inf
    begun: bool = False
    messages: list[int] = field(default_factory=list)
    suspended: bool = False
    _born: float = field(default_factory=time.monotonic)
    _since: float | None = None
    _told_mpirun: bool = False
    _told_ranks: bool = False

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Signal handler: the first signal ends the job in steps, the second one at once."""
        self.hurried = self.signal != 0
        self.signal = self.signal or number

    def on_message(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: the signal is for the ranks, and does not end the job."""
        self.messages.append(number)

    def on_suspend(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. It only notes the wish, because it may interrupt the sending of a message."""
        self.suspended = True

    def suspend(self, team: Team) -> None:
        """If Ctrl-Z has asked for it, suspend hvdliterun until SIGCONT. Agents are told, and do not expect signs of
        life meanwhile."""
        if not self.suspended:
            return
        self.suspended = False
        with team.quiet:  # a sign of life would end the pause for the agents
            team.say(pause=1)
            team.flush(PAUSE_SENT)
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # stops here until SIGCONT
            signal.signal(signal.SIGTSTP, self.on_suspend)
            team.forgive()

    def advance(self, mpirun: subprocess.Popen[bytes], team: Team) -> bool:
        """Take the next step if it is time for it. Returns True if mpirun is to be killed."""
        now = time.monotonic()
        while self.messages:
            team.say(signal=self.messages.pop(0))
        self._look(team)
        if self._since is None:
            if self.signal:
                self._since = now
                team.say(signal=self._sent)
                if not team.begun:
                    self._told_mpirun, self._since = True, now + FAILURE_GRACE
                    mpirun.terminate()
            elif self.lost:
                self._since = now - FAILURE_GRACE
            elif self.failures.first():
                self._since = now
            return False
        grace = FAILURE_GRACE
        if self.signal and not self.lost:
            grace = SIGNAL_GRACE if team.running else 0.0
        if not self._told_mpirun and now - self._since > grace:
            self._told_mpirun, self._since = True, now
            mpirun.terminate()
        return self.hurried or (self._told_mpirun and now - self._since > MPIRUN_GRACE)

    @property
    def _sent(self) -> int:
        """The signal for the ranks. SIGHUP would make UCX print its debug log; SIGPIPE concerns hvdliterun only."""
        return signal.SIGINT if self.signal == signal.SIGINT else signal.SIGTERM

    def _look(self, team: Team) -> None:
        """Note failures and lost hosts. Tell the ranks on all hosts which failure was the first: only that rank prints
        its error."""
        self.failures.add(team.deserter(INIT_PATIENCE))
        first = self.failures.first()
        if first and not self._told_ranks:
            self._told_ranks = True
            team.say(told=first.rank)
        if not first:
            self.lose(team.lost())
        self.begun = self.begun or team.begun
        if not self.begun and time.monotonic() - self._born > self.patience:
            self.lose(
                f"no rank has started within {self.patience:.0f} s: the MPI's daemons do not reach each other (a "
                "firewall?). Name the network that all hosts share with --network-interfaces; -v shows the messages of "
                "the MPI [HVD018]"
            )

    def lose(self, how: str | None) -> None:
        """Note how a host was lost, if none has been before."""
        self.lost = self.lost or how


@contextmanager
def signals(ending: Ending, streams: Streams, several: bool) -> Iterator[None]:
    """Inside, `ending` handles SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2, unless the signal is ignored (nohup).
    These and SIGCHLD wake `streams.wait()`. several: whether SIGTSTP is handled, too.

    Python allows handlers in the main thread only. In other threads nothing is handled.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    awake, wake = os.pipe()
    os.set_blocking(wake, False)
    streams.add(os.dup(awake), lambda data: None)
    acts: dict[signal.Signals, Callable[[int, FrameType | None], None]] = {
        **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), ending.on_signal),
        **dict.fromkeys((signal.SIGUSR1, signal.SIGUSR2), ending.on_message),
        **({signal.SIGTSTP: ending.on_suspend} if several else {}),
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
