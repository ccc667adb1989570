"""Watches over one host's part of a job, for hvdliterun on another host, at the far end of an ssh connection.

What hvdliterun, its pipes and its janitor are on their own host, the agent is on this one: before the start it
answers whether the host is ready, makes the job's folders, then reads the ranks' named pipes and sends what they
write, reports the first failure, passes signals on, and in the end leaves no process and no file. The end is word
from hvdliterun, the end of the connection, or silence: each side says something every second, so that a host
without power or network is noticed by both within seconds.

Rejected: output through the MPI (each tags and cuts it in its own way, and loses the last lines when it ends a job),
and connections of our own (firewalls; ssh is there, and it has checked who is who).
Imports the standard library only: it runs isolated from the user's Python settings.
"""

from __future__ import annotations

import contextlib
import errno
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdlite_launcher import facts, wire
from hvdlite_launcher.entry import SETTLED, entry
from hvdlite_launcher.janitor import (
    Segments,
    claim,
    is_own,
    kill_all,
    leave,
    mark_of,
    part_of,
    rank_processes,
    see_off,
    send,
)
from hvdlite_launcher.keeper import WATCHED
from hvdlite_launcher.ranks import ROOM, Farewell, publish
from hvdlite_launcher.watch import appeared, watch

BEAT = 1.0  # seconds between signs of life
PATIENCE = 3.5  # seconds of silence after which the other side counts as lost, until ranks have started there
LATER = 60.0  # the same afterwards: a network may rest for that long, and a job of days must outlive it
PARTING = 5.0  # the same at the end, when an agent is silent for the seconds that it needs to kill all
FROZEN = 2.0  # seconds without a look, after which silence counts anew: both sides' machine may have stood still
_PAUSE = 0.05  # seconds between looks for MPICH's segments, at first
_CHUNK = 65536
_FULL = 1 << 20  # bytes that may wait to be sent before ranks have to wait
_LATE = 3.0  # seconds in which an MPI's daemon may still come that was on its way when the job ended


def command(python: str, package: str) -> list[str]:
    """What to execute on the host. package: the folder that this package lies in, there as here."""
    code = "import sys; sys.path[:0] = sys.argv[1:2]; from hvdlite_launcher.agent import main; main()"
    return [python, "-I", "-S", "-c", code, package]


def main() -> None:
    """Serve one job, from hvdliterun's first message to the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; our sign is the connection
    os.write(1, wire.MARK)
    decoder, job = wire.Decoder(), None
    while job is None:
        data = os.read(0, _CHUNK)
        if not data:
            return
        job = next((frame for _, _, frame in decoder.feed(data)), None)  # the rest stays in the decoder
    agent = Agent(decoder)
    agent.take(wire.MESSAGE, job)
    agent.serve()


@dataclass
class Agent:
    """One job's agent. _job: its id, folders, what ranks are started with, and patience with silence, until ranks have
    started here and afterwards (`run._job`)."""

    decoder: wire.Decoder
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _unsent: bytearray = field(default_factory=bytearray)
    _pipes: dict[int, tuple[int, int]] = field(default_factory=dict)
    _job: dict[str, Any] = field(default_factory=dict)
    _heard: float = field(default_factory=time.monotonic)
    _paused: bool = False
    _ending: int = 0
    _farewell: Farewell = field(default_factory=Farewell)
    _over: bool = False
    _begun: bool = False
    _made: list[str] = field(default_factory=list)
    _parents: list[str] = field(default_factory=list)
    _segments: Segments = field(default_factory=lambda: Segments(""))
    _pause: float = BEAT / 2

    def take(self, kind: int, data: bytes) -> None:
        """Act on a frame of hvdliterun's."""
        if kind == wire.TASK:
            self._publish("task", data)
            return
        message = wire.decode(data)
        self._paused = "pause" in message
        if "job" in message:
            self._open(message["job"])
        if "told" in message:
            self._publish("told", str(message["told"]).encode())
        number = message.get("signal")
        if number in (signal.SIGINT, signal.SIGTERM):
            self._publish("ending", b"")
            self._ending = number
            self._farewell.say(self._job["folder"], number)
        elif number:
            send(rank_processes(self._job["folder"]), number)
        self._over |= "end" in message

    def serve(self) -> None:
        """Work until the end of the job; then clean up."""
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(0, selectors.EVENT_READ, self._listen)
        beaten = looked = 0.0
        try:
            while not self._over and (self._paused or time.monotonic() - self._heard < self._patience):
                began = time.monotonic()
                if began - beaten > BEAT:
                    beaten, ranks = began, entry(self._job["folder"], SETTLED)
                    self._say(absent=ranks.absent, waiting=ranks.waiting)
                if began - looked > self._pause:  # not at each line of output: a look takes milliseconds
                    looked, self._pause = began, min(self._pause * 1.2, BEAT / 2)
                    self._segments.look()
                self._turn(self._pause)
                if time.monotonic() - began > FROZEN:
                    self._heard = time.monotonic()
        finally:
            self._clean_up()
        self._say(gone=1)
        self._flush_all()
        os.closerange(0, 3)  # which ends the connection
        if not self._begun:
            self._turn_away()
        see_off(self._mark())

    def _open(self, job: dict[str, Any]) -> None:
        self._job = job
        try:
            os.chdir(job["cwd"])
            for path in filter(None, (job["folder"], job["shared"])):
                self._parents += _missing_parents(path)
                claim(path)
                self._made.append(path)
            self._job = job = {**job, "folder": part_of(job["folder"])}
            self._segments = Segments(job["folder"])
            publish(job["folder"], WATCHED, bytes(ROOM))
            facts.check_interfaces(job["interfaces"])
            descriptor = watch(job["folder"])
            self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._look(descriptor))
            self._ask(job["command"], job["env"])
        except FileExistsError as error:
            twice = "this machine is in the list under another name too"
            self._say(problem=twice if is_own(error.filename) else f"another user has made {path}: start again")
        except OSError as error:
            where = error.filename or (job["folder"] if error.errno == errno.ENOSPC else None)
            self._say(problem=f"{error.strerror}: {where}" if where else str(error))

    def _ask(self, program: list[str], env: Mapping[str, str]) -> None:
        """Have a child find out what must be alike on all hosts, and report it when it has ended."""
        child = facts.questions(program, {**os.environ, **env})
        if child is None:
            self._say(facts={}, name=socket.gethostname())
            return
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        mark = {"HVDLITE_JOB_ID": self._job["id"]}
        asked = subprocess.Popen(child, env={**os.environ, **env, **mark}, stdin=null, stdout=pipe, stderr=pipe)
        assert asked.stdout is not None
        answer = asked.stdout.fileno()

        def listen() -> None:
            self._selector.unregister(answer)
            out, err = asked.communicate()
            found = facts.answers(out.decode(errors="replace"))
            last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
            if found:
                self._say(facts=found, name=socket.gethostname())
            else:
                self._say(problem=f"{child[0]} does not work: {last[0]}")

        self._selector.register(answer, selectors.EVENT_READ, listen)

    def _turn(self, timeout: float) -> None:
        """Wait for something, and act on it."""
        sending = selectors.EVENT_WRITE if self._unsent else 0
        if sending:
            self._selector.register(1, sending, self._flush)
        full = len(self._unsent) > _FULL
        if full:
            time.sleep(0.005)
        for key, _ in self._selector.select(timeout):
            if full and key.fd in self._pipes:
                continue
            key.data()
        if sending:
            self._selector.unregister(1)

    def _listen(self) -> None:
        data = os.read(0, _CHUNK)
        self._heard = time.monotonic()
        self._over |= not data
        for kind, _, frame in self.decoder.feed(data):
            self.take(kind, frame)

    def _look(self, descriptor: int) -> None:
        """Act on the files that keepers and ranks make in the job's folder."""
        for name, complete in appeared(descriptor):
            kind, _, number = name.partition(".")
            path = os.path.join(self._job["folder"], name)
            if kind in ("out", "err") and not complete and number.isdigit():
                self._read_from(path, wire.STDOUT if kind == "out" else wire.STDERR, int(number))
            elif kind == "pid" and complete:
                self._begun = True
                self._say(started=int(number))
                if self._ending:
                    self._farewell.say(self._job["folder"], self._ending)
                self._pause = _PAUSE  # soon there will be segments
            elif kind == "ended" and complete:
                self._say(ended=int(number))
            elif name == "failed" and complete:
                self._report(path)
            elif kind == "swallowed" and complete and number.isdigit():
                with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
                    self._say(swallowed=file.read(), rank=int(number))
            elif kind == "result" and complete:
                with open(path, "rb") as file:
                    self._unsent += wire.encode(wire.RESULT, int(number), file.read())

    def _report(self, path: str) -> None:
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            self._say(failed=file.read())

    def _read_from(self, path: str, kind: int, rank: int) -> None:
        with contextlib.suppress(OSError):
            pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._pipes[pipe] = (kind, rank)
            self._selector.register(pipe, selectors.EVENT_READ, lambda: self._carry(pipe))

    def _carry(self, pipe: int) -> bool:
        """Pass one chunk of a rank's output on; False when there is none."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
            del self._pipes[pipe]
            return False
        self._unsent += wire.encode(*self._pipes[pipe], data)
        return True

    def _publish(self, name: str, data: bytes) -> None:
        if not self._made:
            return
        with contextlib.suppress(OSError):
            publish(self._job["folder"], name, data)

    def _say(self, **values: Any) -> None:
        self._unsent += wire.message(now=time.time(), **values)
        self._flush()

    def _flush(self) -> None:
        try:
            del self._unsent[: os.write(1, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # nobody listens any more
            self._unsent.clear()
            self._over = True

    def _flush_all(self) -> None:
        left, since = len(self._unsent), time.monotonic()
        while self._unsent and time.monotonic() - since < PATIENCE:
            self._flush()
            if len(self._unsent) < left:
                left, since = len(self._unsent), time.monotonic()
            else:
                time.sleep(0.005)

    @property
    def _patience(self) -> float:
        early, later = self._job["patience"]
        return float(later if self._begun else early)

    def _mark(self) -> bytes:
        return mark_of(str(self._job.get("id")), self._job.get("env", {}), os.environ)

    def _clean_up(self) -> None:
        """Kill, read the last words, report a failure not yet reported, and remove. Nothing in here waits for
        the connection."""
        self._segments.look(last=True)
        kill_all(self._mark())
        self._turn(0)
        for pipe in list(self._pipes):
            while len(self._unsent) < 64 * _FULL and self._carry(pipe):
                pass
        for path in self._segments.found:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._remove()

    def _remove(self) -> None:
        for tree in reversed(self._made):
            leave(tree, whole=False)
        for folder in self._parents:
            with contextlib.suppress(OSError):  # others have something in there
                os.rmdir(folder)

    def _turn_away(self) -> None:
        """No rank has begun here, so the MPI's daemon may come only now: Open MPI's makes the job's folder anew."""
        deadline = time.monotonic() + _LATE
        while time.monotonic() < deadline:
            time.sleep(0.1)
            kill_all(self._mark())
            self._remove()


def _missing_parents(path: str) -> list[str]:
    """The folders around it that are not there, innermost first: TMPDIR's, where only the launching host has it."""
    found = []
    while not os.path.exists(path := os.path.dirname(path)):
        found.append(path)
    return found
