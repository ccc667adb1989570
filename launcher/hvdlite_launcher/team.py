"""The team: all hosts of a job that have an agent, as hvdliterun sees them.

A member of the team is one host with an agent. On hvdliterun's own host the agent is a child process; ssh connections
lead to the others. If a scheduler starts the ranks, hvdliterun's host is the only member. All agents start at the same
time and report whether their hosts are ready, before any rank starts: the user sees the problems of all hosts in one
table. A thread sends signs of life to the agents, because the main thread may have to wait for a terminal that takes no
output.

Between hvdliterun and its own agent silence means nothing: a closed pipe is a sure sign of the other's death.
"""

import contextlib
import fcntl
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hvdlite_launcher import UsageError, agent, facts, readiness, times, wire
from hvdlite_launcher.command import Job, Settings
from hvdlite_launcher.environment import LOGIN
from hvdlite_launcher.failures import Failure, Failures, deserter, parse
from hvdlite_launcher.streams import Streams

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that this package lies in
_PIPE = 1 << 20  # bytes


@dataclass
class Report:
    """What an agent has reported about its host.

    facts: of `facts`, once the host is ready. name: the host's own. problem: why the host cannot take part. started,
    finished: numbers of ranks. absent, waiting: see `job_folder.arrivals`. results: by rank, contents of `result.RANK`.
    swallowed: by rank, contents of `swallowed.RANK`. summary: contents of `summary.0`, or None. gone: nothing of the
    job is left on the host.
    """

    facts: dict[str, str] | None = None
    name: str = ""
    problem: str | None = None
    started: int = 0
    finished: int = 0
    absent: tuple[int, ...] = ()
    waiting: float = 0.0
    results: dict[int, bytes] = field(default_factory=dict)
    swallowed: dict[int, str] = field(default_factory=dict)
    summary: str | None = None
    gone: bool = False

    def hear(self, message: Mapping[str, Any]) -> None:
        """Note a message. Raises LookupError or TypeError if no agent sends such a message."""
        if "facts" in message:
            self.facts, self.name = message["facts"], message["name"]
        if "problem" in message:
            self.problem = message["problem"]
        if "absent" in message:
            self.absent, self.waiting = tuple(message["absent"]), message["waiting"]
        if "swallowed" in message:
            self.swallowed[message["rank"]] = message["swallowed"]
        if "summary" in message and message["rank"] == 0:
            self.summary = message["summary"]
        self.started += "started" in message
        self.finished += "ended" in message
        self.gone |= "gone" in message


@dataclass
class Member:
    """One host of the team.

    own: whether it is hvdliterun's own host. process: its agent, or ssh. link: to the agent. ranks: those of this host,
    or None if the MPI may place them otherwise. patience: seconds of silence after which the host is lost, before and
    after a rank has started there. report: of the agent. said: what ssh or the agent has written to stderr.
    """

    name: str
    own: bool
    process: subprocess.Popen[bytes]
    streams: Streams
    failures: Failures
    patience: tuple[float, float]
    ranks: range | None
    report: Report = field(default_factory=Report)
    said: bytes = b""
    _garbled: bool = False
    _offset: float = math.inf  # from the host's clock to ours; the least is the best, as messages take time

    def __post_init__(self) -> None:
        assert self.process.stdin is not None
        self.link = wire.Link(self.process.stdin.fileno(), marked=True)

    def listen(self, data: bytes) -> None:
        """Act on bytes from the agent. No bytes: the connection has ended."""
        try:
            for kind, rank, frame in self.link.take(b"" if self._garbled else data):
                self._take(kind, rank, frame)
        except (ValueError, LookupError, TypeError):
            self._garbled = True

    def _take(self, kind: int, rank: int, frame: bytes) -> None:
        if kind == wire.MESSAGE:
            message = wire.decode(frame)
            self._offset = min(self._offset, time.time() - message["now"])
            self.report.hear(message)
            if "failed" in message:
                with contextlib.suppress(ValueError):  # the file is empty: the host's disk is full
                    failure = parse(message["failed"], self.name, self._offset, message["inside"])
                    self.failures.add(failure)
        elif kind == wire.RESULT:
            if self.ranks is None or rank in self.ranks:  # hvdliterun will unpickle it
                self.report.results[rank] = frame
        else:
            self.streams.output(rank, 1 if kind == wire.STDOUT else 2, frame)

    def note(self, data: bytes) -> None:
        """Keep what ssh or the agent has written to stderr."""
        self.said += data

    @property
    def present(self) -> bool:
        """Whether the agent has reported that the host is ready, or why not."""
        return self.report.facts is not None or self.report.problem is not None

    @property
    def timeout(self) -> float:
        """Seconds of silence after which the host is lost."""
        return self.patience[self.report.started > 0]

    @property
    def lost(self) -> str | None:
        """How the host was lost, or None: the connection broke, the host is silent, or it sends no frames."""
        if self._garbled:
            return (
                f"host {self.name} sent unreadable data: is hvdlite the same there, or does its login shell print "
                "text? [HVD909]"
            )
        if self.link.closed:
            said = self.said.decode(errors="replace").strip().splitlines()
            if self.own:
                return (
                    f"hvdliterun's agent on this host ended: {said[-1] if said else 'was it killed (out of memory)?'}"
                )
            return f"host {self.name} was lost: {said[-1] if said else 'the connection broke'} [HVD909]"
        if self.link.silence > self.timeout:
            return f"host {self.name} was lost: no sign of life for {self.timeout:g} s (--host-timeout) [HVD909]"
        return None

    def problem(self, timeout: float) -> str | None:
        """Why the host is not ready, or None. timeout: the user's."""
        if self.report.problem:
            return self.report.problem
        if self.report.facts is not None:
            return None
        if not self.link.closed:
            return f"no answer within {timeout:g} s (--start-timeout) [HVD014]"
        return readiness.explain(self.name, self.said.decode(errors="replace"), self.process.wait(), _PACKAGE)

    def end(self, seconds: float) -> None:
        """Have the agent clean up, within so many seconds."""
        self.patience = (min(self.patience[0], seconds), min(self.patience[1], seconds))
        if self.own:  # a terminal that takes no output may have kept hvdliterun from listening
            self.link.forgive()
        self.link.say(end=1)

    def close(self) -> None:
        """Close the connection. hvdliterun's own agent may still wait for helpers of killed ranks."""
        self.link.close()
        if not self.own:
            self.process.kill()
            self.process.wait()
        dismiss(self.process)


class Team:
    """All hosts of one job.

    own: hvdliterun's own host, also if no rank runs there. others: the other hosts. quiet: while this lock is held, no
    signs of life are sent. _silent: hosts whose silence the user knows of. _asked: when
    silence was measured last.
    """

    def __init__(
        self, settings: Settings, job: Job, streams: Streams, failures: Failures, own: subprocess.Popen[bytes]
    ) -> None:
        self._settings, self._job = settings, job
        self._streams, self._failures = streams, failures
        self.quiet = threading.Lock()
        self._silent: set[str] = set()
        self._asked = time.monotonic()
        self.own = self._member(os.uname().nodename, own, own=True)
        self.others: list[Member] = []

    @property
    def members(self) -> list[Member]:
        """All hosts, hvdliterun's own first."""
        return [self.own, *self.others]

    def open(self, env: Mapping[str, str], task: bytes | None) -> None:
        """Connect to the other hosts, and describe the job to all agents.

        env: the ranks' environment. task: contents of the file `task` on all hosts, or None.
        """
        self._open(self.own, env)
        self.others += [self._reach(host.name) for host in self._settings.hosts if not host.local]
        for member in self.others:
            self._open(member, env)
        for member in self.members if task is not None else ():
            member.link.send(wire.encode(wire.TASK, 0, task or b""))

    def _open(self, member: Member, env: Mapping[str, str], successor: bool = False) -> None:
        own, settings = member.own, self._settings
        theirs = {name: value for name, value in env.items() if own or name not in LOGIN or name in settings.env}
        asked = settings.several and not successor and self._has_ranks(member)
        member.link.say(job={
            "id": self._job.id, "folder": self._job.folder, "shared": self._job.shared,
            "cwd": "/" if successor else os.getcwd(),
            "ranks": settings.most_slots, "parts": settings.elsewhere, "whole": own, "successor": successor,
            "env": theirs, "command": settings.command if asked else [], "interfaces": settings.interfaces,
            "patience": (math.inf, math.inf) if own else settings.host_timeout,
        })  # fmt: skip

    def _has_ranks(self, member: Member) -> bool:
        """Whether the host is in the list. hvdliterun's own host need not be."""
        return any(host.name == member.name for host in self._settings.hosts)

    def _reach(self, name: str) -> Member:
        """Another host, and a connection to a new agent there. Raises UsageError."""
        argv = self._settings.ssh.command(name, agent.command(sys.executable, _PACKAGE))
        try:  # the connection has the job's mark: if it hangs, hvdliterun's own agent kills it
            process = _start(argv, {**os.environ, "HVDLITE_JOB_ID": self._job.id})
        except FileNotFoundError as error:
            raise UsageError(self._settings.ssh.missing(argv[0], name), 127) from error
        return self._member(name, process, own=False)

    def _member(self, name: str, process: subprocess.Popen[bytes], own: bool) -> Member:
        """A host whose agent runs, with a link to it. own: whether it is hvdliterun's own host."""
        patience = (math.inf, math.inf) if own else self._settings.host_timeout
        ranks = None if own else self._settings.ranks_of(name)
        member = Member(name, own, process, self._streams, self._failures, patience, ranks)
        assert process.stdin and process.stdout and process.stderr
        os.set_blocking(process.stdin.fileno(), False)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # more than an unprivileged user may have
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
        self._streams.add(os.dup(process.stdout.fileno()), member.listen)
        self._streams.add(os.dup(process.stderr.fileno()), member.note)
        return member

    def say(self, **values: object) -> None:
        """Send a message to all agents."""
        for member in self.members:
            member.link.say(**values)

    def flush(self, seconds: float = 0.0) -> bool:
        """Send the rest of earlier messages, for at most so many seconds. Returns whether some are left."""
        deadline = time.monotonic() + seconds
        while sum(member.link.send() for member in self.members if not member.link.closed):
            if time.monotonic() >= deadline:
                return True
            time.sleep(0.005)
        return False

    @property
    def begun(self) -> bool:
        """Whether any rank has started."""
        return any(member.report.started for member in self.members)

    @property
    def running(self) -> bool:
        """Whether there is a rank that has not ended."""
        return any(member.report.started > member.report.finished for member in self.members)

    @property
    def finished(self) -> int:
        """How many ranks have ended."""
        return sum(member.report.finished for member in self.members)

    def deserter(self, patience: float) -> Failure | None:
        """See `failures.deserter`."""
        absent = [(rank, member.name) for member in self.members for rank in member.report.absent]
        return deserter(absent, max(member.report.waiting for member in self.members), patience)

    def forgive(self) -> None:
        """Measure the silence of all hosts from now on, because hvdliterun has not listened."""
        for member in self.members:
            member.link.forgive()

    def lost(self) -> str | None:
        """Which host was lost, and how; or None. The main loop calls this all the time."""
        self._notice_standstill()
        for member in self.others:
            self._tell_silence(member)
        return next(filter(None, (each.lost for each in self.members)), None)

    def _notice_standstill(self) -> None:
        """Measure silence from now on if nobody has asked for it for STANDSTILL: hvdliterun itself has stood still, or
        has waited for the reader of its output."""
        asked, self._asked = self._asked, time.monotonic()
        if self._asked - asked > times.STANDSTILL:
            self.forgive()

    def _tell_silence(self, member: Member) -> None:
        """Print a line when a host falls silent, and one when it answers again."""
        silent = member.link.silence > times.SILENCE_TOLD and not member.link.closed
        if silent == (member.name in self._silent):
            return
        self._silent ^= {member.name}
        ends = f"the job ends if it stays silent for {member.timeout:g} s in all (--host-timeout) [HVD909]"
        news = f"no sign of life for {times.SILENCE_TOLD:g} s; {ends}" if silent else "it answers again"
        self._streams.say(f"host {member.name}: {news}")

    def prepare(self, stop: Callable[[], bool]) -> bool:
        """Wait until every host is ready, or until `stop()` is true. Returns whether all are ready.

        Raises UsageError, NotReadyError.
        """
        timeout, members = self._settings.ssh.connect_timeout, self.members
        deadline = time.monotonic() + self._settings.start_timeout
        while any(not (each.present or each.link.closed) for each in members) and time.monotonic() < deadline:
            if stop():
                return False
            self._streams.wait()
        alone = not self._settings.several or not self._has_ranks(self.own)
        if alone and (problem := self.own.problem(timeout)):
            raise UsageError(f"this host is not ready: {problem}", 1)
        if not self._settings.several:
            return True
        states: dict[str, str | None] = dict.fromkeys(host.name for host in self._settings.hosts)
        states |= {each.name: problem for each in members if (problem := each.problem(timeout))}
        reports = {each.name: each.report for each in members if each.name in states}
        known = {host: report.facts for host, report in reports.items() if report.facts}
        states |= {host: text for host, text in facts.differences(known).items() if not states[host]}
        states |= facts.same_names({host: report.name for host, report in reports.items()})
        if readiness.unready(states):
            raise readiness.NotReadyError(states)
        return True

    def close(self, env: Mapping[str, str]) -> None:
        """Have all agents clean up, and print the last output of their ranks.

        hvdliterun's own agent comes last, because it also kills hanging connections. If an agent was killed, a
        successor does its work. A host that does not answer is given up; its agent cleans up when it notices the
        silence.
        """
        self._asked = time.monotonic()  # what came before was no standstill
        for members in (self.others, [self.own]):
            for each in members:
                each.end(times.CLOSING_TIMEOUT)
            while any((each.present or each.own) and not each.lost for each in members):
                self._streams.wait()
                self._notice_standstill()
            left = [each for each in members if not each.report.gone]
            killed = [each for each in left if each.own or (each.present and each.link.closed)]
            successors = [self._member(each.name, own_agent(), own=True) if each.own else self._reach(each.name)
                          for each in killed]  # fmt: skip
            for each in successors:
                self._open(each, env, successor=True)
                each.end(times.SUCCESSOR)
            while any(not each.lost for each in successors):
                self._streams.wait()
                self._notice_standstill()
            for each in [*members, *successors]:
                each.close()


def own_agent() -> subprocess.Popen[bytes]:
    """A new agent on this host; it waits for a job. Its environment is what Python needs: no mark of a job."""
    env = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
    return _start(agent.command(sys.executable, _PACKAGE), env)


def _start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


def dismiss(process: subprocess.Popen[bytes]) -> None:
    """Close the pipes of a process, and reap it when it ends, without waiting."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        with contextlib.suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    threading.Thread(target=process.wait, daemon=True).start()


@contextmanager
def a_team(team: Team, env: Mapping[str, str], task: bytes | None) -> Iterator[Team]:
    """Inside, the agents of all hosts serve the job. At the end nothing of the job is left on any host."""
    over = threading.Event()
    with contextlib.ExitStack() as at_end:
        at_end.callback(over.set)
        at_end.callback(team.close, env)
        team.open(env, task)
        threading.Thread(target=_beat, args=(team, over), daemon=True, name="signs of life").start()
        yield team


def _beat(team: Team, over: threading.Event) -> None:
    beaten, left = time.monotonic(), True
    while not over.wait(0.01 if left else times.BEAT):
        if time.monotonic() - beaten > times.BEAT:
            beaten = time.monotonic()
            with team.quiet:
                team.say(beat=1)
        left = team.flush()
