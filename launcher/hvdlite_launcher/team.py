"""The other hosts of a job, each with its agent at the far end of an ssh connection; on one host, an empty team.

Reached in parallel before anything starts, so that what is wrong is told at once, for all hosts, and in our words. A
thread sends signs of life, since the main thread may be held up by a terminal that takes no output.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvdlite_launcher import agent, facts, janitor, readiness, wire
from hvdlite_launcher.command import Place, Settings
from hvdlite_launcher.entry import Entry
from hvdlite_launcher.failures import Failures, parse
from hvdlite_launcher.ssh import Ssh
from hvdlite_launcher.streams import Streams
from hvdlite_launcher.usage import UsageError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that this package lies in
_PIPE = 1 << 20  # bytes
_PATIENCE = 30.0  # seconds; Python may lie on a network's disk
_SILENCE = 5.0  # seconds after which a host's silence is worth a line
_TIDYING = 3.0  # seconds for janitors to be reached, and do the work of agents


@dataclass
class Remote:
    """One other host. facts: its answer, once it is there. problem: why it cannot take part.

    patience: seconds of silence after which it is lost; later: the same, once ranks have started there. heard: when it
    last gave a sign of life. started, finished: how many ranks have there. entry: as it said last. ended: its
    connection is closed. gone: its agent has cleaned up. said: what ssh, or an agent in trouble, has written to stderr.
    results: what its ranks have returned. ranks: which it has, or None where the MPI may place them otherwise.
    swallowed: errors that their scripts have caught, by rank, though another rank had left.
    """

    name: str
    process: subprocess.Popen[bytes]
    streams: Streams
    failures: Failures
    patience: float
    later: float = agent.LATER
    facts: dict[str, str] | None = None
    own_name: str = ""
    problem: str | None = None
    heard: float = field(default_factory=time.monotonic)
    started: int = 0
    finished: int = 0
    entry: Entry = field(default_factory=Entry)
    ended: bool = False
    gone: bool = False
    said: bytes = b""
    results: dict[int, bytes] = field(default_factory=dict)
    swallowed: dict[int, str] = field(default_factory=dict)
    ranks: range | None = None
    _garbled: bool = False
    _offset: float = math.inf  # from the host's clock to ours; the least is nearest, as messages take time
    _decoder: wire.Decoder = field(default_factory=lambda: wire.Decoder(marked=True))
    _unsent: bytearray = field(default_factory=bytearray)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def listen(self, data: bytes) -> None:
        """Take what the agent has sent; nothing: the connection has ended."""
        self.ended |= not data
        if self._garbled:
            return
        self.heard = time.monotonic()
        try:
            for kind, rank, frame in self._decoder.feed(data):
                self._take(kind, rank, frame)
        except (ValueError, LookupError, TypeError):
            self._garbled = True

    def _take(self, kind: int, rank: int, frame: bytes) -> None:
        if kind == wire.MESSAGE:
            self._hear(wire.decode(frame))
        elif kind == wire.RESULT:
            if self.ranks is None or rank in self.ranks:  # it will be unpickled here
                self.results[rank] = frame
        else:
            self.streams.output(rank, 1 if kind == wire.STDOUT else 2, frame)

    def note(self, data: bytes) -> None:
        """Take what ssh, or an agent in trouble, has written to stderr."""
        self.said += data

    def send(self, data: bytes) -> bool:
        """Send frames, after what is left of earlier ones; never waits. To an agent that is gone, they are lost.
        Whether something is left."""
        assert self.process.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._unsent += data
            if self._unsent:
                del self._unsent[: os.write(self.process.stdin.fileno(), self._unsent)]
        return bool(self._unsent) and not self.ended

    @property
    def silence(self) -> float:
        """For how many seconds it has given no sign of life."""
        return time.monotonic() - self.heard

    @property
    def present(self) -> bool:
        """Whether there is an agent at the other end."""
        return self.facts is not None or self.problem is not None

    @property
    def lost(self) -> str | None:
        """How the host was lost, if it was: the connection broke, or it has been silent for too long, or garbled."""
        if self._garbled:
            return "what it sends is no message of hvdlite's"
        if self.ended:
            return (self.said.decode(errors="replace").strip().splitlines()[-1:] or ["the connection broke"])[0]
        return f"no sign of life for {self.patience:g} s (--host-timeout)" if self.silence > self.patience else None

    def _hear(self, message: Mapping[str, Any]) -> None:
        self._offset = min(self._offset, time.time() - message["now"])
        if "facts" in message:
            self.facts, self.own_name = message["facts"], message["name"]
        if "problem" in message:
            self.problem = message["problem"]
        if "started" in message:
            self.started += 1
            self.patience = self.later
        if "ended" in message:
            self.finished += 1
        if "absent" in message:
            self.entry = Entry(tuple(message["absent"]), message["waiting"])
        if "swallowed" in message:
            self.swallowed[message["rank"]] = message["swallowed"]
        self.gone |= "gone" in message
        if "failed" in message:
            with contextlib.suppress(ValueError):  # nothing could be written there: no room
                self.failures.add(parse(message["failed"], self.name, self._offset))


@dataclass
class Team:
    """All other hosts of one job. quiet: while it is held, no signs of life are sent. _silent: hosts whose silence has
    been told."""

    streams: Streams
    remotes: list[Remote] = field(default_factory=list)
    quiet: threading.Lock = field(default_factory=threading.Lock)
    _silent: set[str] = field(default_factory=set)
    _asked: float = field(default_factory=time.monotonic)

    def say(self, **values: Any) -> None:
        """Send a message to all agents."""
        for remote in self.remotes:
            remote.send(wire.message(**values))

    def flush(self, seconds: float) -> None:
        """Send what is left of earlier messages, as far as that can be done in so many seconds."""
        deadline = time.monotonic() + seconds
        while sum(remote.send(b"") for remote in self.remotes) and time.monotonic() < deadline:
            time.sleep(0.005)

    def signal(self, number: int) -> bool:
        """Send a signal to all ranks on other hosts; whether there are any."""
        self.say(signal=number)
        return any(remote.started for remote in self.remotes)

    @property
    def running(self) -> bool:
        """Whether there is any rank on another host that has not ended."""
        return any(remote.started > remote.finished for remote in self.remotes)

    def forgive(self) -> None:
        """Count all hosts' silence from now on: we have not listened."""
        for remote in self.remotes:
            remote.heard = time.monotonic()

    def lost(self) -> str | None:
        """Which host was lost, if any, and how. To be asked all the time."""
        asked, self._asked = self._asked, time.monotonic()
        if self._asked - asked > agent.FROZEN:
            self.forgive()
        for remote in self.remotes:
            self._tell_silence(remote)
        return next((f"host {each.name} was lost: {each.lost}" for each in self.remotes if each.lost), None)

    def _tell_silence(self, remote: Remote) -> None:
        """One line when a host has fallen silent, and one when it is heard again."""
        silent = remote.silence > _SILENCE and not remote.ended
        if silent == (remote.name in self._silent):
            return
        self._silent ^= {remote.name}
        ends = f"no sign of life for {_SILENCE:g} s; the job ends after {remote.patience:g} s of that (--host-timeout)"
        self.streams.say(f"host {remote.name}: {ends if silent else 'it is heard again'}")

    def prepare(self, settings: Settings, job: Mapping[str, Any], stop: Callable[[], bool]) -> None:
        """Wait until every host is ready for the job, or `stop`. Raises NotReadyError."""
        here = next((host.name for host in settings.hosts if host.local), None)
        known = {here: _own_facts(job["command"], {**os.environ, **job["env"]})} if here else {}
        deadline = time.monotonic() + settings.start_timeout
        while any(not (remote.present or remote.ended) for remote in self.remotes) and time.monotonic() < deadline:
            if stop():
                return
            self.streams.wait()
        states: dict[str, str | None] = {host.name: None for host in settings.hosts}
        try:
            facts.check_interfaces(job["interfaces"])
        except OSError as error:
            states |= {here: str(error)} if here else {}
        for remote in self.remotes:
            states[remote.name] = _problem(remote, settings.start_timeout)
        known |= {remote.name: remote.facts for remote in self.remotes if remote.facts}
        states |= {host: f"differs: {text}" for host, text in facts.differences(known).items() if not states[host]}
        names = {_short(socket.gethostname())} if here else set()
        for remote in self.remotes:
            if remote.facts is not None and _short(remote.own_name) in names:
                states[remote.name] = f"has the host name of another one: {remote.own_name}"
            names.add(_short(remote.own_name))
        if readiness.unready(states):
            raise readiness.NotReadyError(states)

    def close(self) -> None:
        """Have all agents clean up, and print their ranks' last words. A host that does not answer is left alone."""
        self.say(end=1)
        for remote in self.remotes:
            remote.patience = min(remote.patience, agent.PARTING)
        while any(remote.present and not remote.lost for remote in self.remotes):
            self.streams.wait()
        for remote in self.remotes:
            remote.process.kill()
            remote.process.wait()
            for pipe in (remote.process.stdin, remote.process.stdout, remote.process.stderr):
                with contextlib.suppress(OSError):
                    pipe.close()  # type: ignore[union-attr]


@contextmanager
def a_team(
    settings: Settings,
    place: Place,
    job: Mapping[str, Any],
    task: bytes | None,
    streams: Streams,
    failures: Failures,
) -> Iterator[Team]:
    """Agents on all hosts but this one, told of the job; gone at the end.

    job: their first message, of `run._job`. task: a file for all hosts, or None.
    """
    others = [host.name for host in settings.hosts if not host.local]
    team = Team(streams, [_connect(name, settings, place, streams, failures) for name in others])
    for remote in team.remotes:
        remote.ranks = settings.ranks_of(remote.name)
    team.say(job=job)
    if task is not None:
        for remote in team.remotes:
            remote.send(wire.encode(wire.TASK, 0, task))
    over = threading.Event()
    beats = threading.Thread(target=_beat, args=(team, over), daemon=True, name="signs of life")
    if team.remotes:
        beats.start()
    try:
        yield team
    finally:
        over.set()
        team.close()
        killed = [remote.name for remote in team.remotes if remote.present and remote.ended and not remote.gone]
        _clean_up(killed, settings.ssh, place, janitor.mark_of(place.id, job["env"]))


def _clean_up(names: Sequence[str], ssh: Ssh, place: Place, mark: bytes) -> None:
    """Have janitors do the work of agents that have been killed, on those of these hosts that can still be reached."""
    deadline = time.monotonic() + _TIDYING
    command = [sys.executable, "-I", "-S", janitor.__file__]
    order = janitor.order(place.root, place.shared, mark, whole=False)
    connections = [_start(ssh.command(name, command), place) for name in names]
    for each in connections:
        assert each.stdin
        with contextlib.suppress(OSError), each.stdin:
            each.stdin.write(order)
    for each in connections:
        with contextlib.suppress(subprocess.TimeoutExpired):
            each.wait(max(0.0, deadline - time.monotonic()))


def _beat(team: Team, over: threading.Event) -> None:
    beaten, left = time.monotonic(), True
    while not over.wait(0.01 if left else agent.BEAT):
        if time.monotonic() - beaten > agent.BEAT:
            beaten = time.monotonic()
            with team.quiet:
                team.say(beat=1)
        left = sum(remote.send(b"") for remote in team.remotes) > 0


def _connect(name: str, settings: Settings, place: Place, streams: Streams, failures: Failures) -> Remote:
    argv = settings.ssh.command(name, agent.command(sys.executable, _PACKAGE))
    try:
        process = _start(argv, place)
    except FileNotFoundError as error:
        raise UsageError(f"no {argv[0]}, by which {name} is reached: install OpenSSH's client", 127) from error
    assert process.stdin and process.stdout and process.stderr
    os.set_blocking(process.stdin.fileno(), False)
    with contextlib.suppress(OSError):  # more than an unprivileged user may have
        fcntl.fcntl(process.stdin, fcntl.F_SETPIPE_SZ, _PIPE)
    remote = Remote(name, process, streams, failures, *settings.host_timeout)
    streams.add(os.dup(process.stdout.fileno()), remote.listen)
    streams.add(os.dup(process.stderr.fileno()), remote.note)
    return remote


def _start(argv: Sequence[str], place: Place) -> subprocess.Popen[bytes]:
    """Start a connection."""
    pipe = subprocess.PIPE
    env = {**os.environ, "HVDLITE_JOB_ID": place.id}  # for our janitor: a connection to nowhere may hang
    return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


def _short(name: str) -> str:
    """What MPIs tell hosts apart by."""
    return name.partition(".")[0]


def _own_facts(command: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    null = subprocess.DEVNULL
    with contextlib.suppress(FileNotFoundError, subprocess.TimeoutExpired):
        if child := facts.questions(command, env):
            found = subprocess.run(child, env=dict(env), stdin=null, capture_output=True, text=True, timeout=_PATIENCE)
            return facts.answers(found.stdout)
    return {}  # the other hosts are compared with each other


def _problem(remote: Remote, timeout: float) -> str | None:
    if remote.problem or remote.facts is not None:
        return remote.problem
    if not remote.ended:
        return f"no answer within {timeout:g} s (--start-timeout)"
    code = remote.process.wait()
    return readiness.explain(remote.name, remote.said.decode(errors="replace"), code, _PACKAGE)
