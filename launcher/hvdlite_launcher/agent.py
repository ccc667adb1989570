"""The agent: a process that watches over a job's ranks on one host, and leaves nothing of the job there.

Each host that hvdliterun itself reaches has an agent. On hvdliterun's own host it is a child process of hvdliterun; on
other hosts an ssh connection starts it. If a scheduler starts the ranks, only hvdliterun's host has an agent. It makes
the job's folder and reports whether the host is ready. While the job runs, it forwards the ranks' output, reports how
ranks begin and end, and sends them signals.

At the job's end the agent kills every process of the job and removes its files. It does the same when hvdliterun dies:
the connection closes then. On other hosts a silent hvdliterun counts as dead, too: both sides send a sign of life every
second. No other code cleans up, so the steps that must work after a crash are the steps of every job.

Rejected: output through the MPI, because each MPI labels and cuts lines in its own way, and loses the last lines when
it ends a job. Rejected: network connections of our own, because of firewalls; ssh has also checked the host's identity.
The agent imports little, and only from the standard library: the start of a job waits for it. It runs isolated from the
user's Python settings.
"""

import contextlib
import errno
import os
import resource
import select
import selectors
import signal
import time
from collections.abc import Iterable
from typing import Any

from hvdlite_launcher import job_folder, times, wire
from hvdlite_launcher.processes import Segments, kill_all, mark_of, rank_processes, see_off, send
from hvdlite_launcher.watch import Polled, appeared, watch

_CHUNK = 65536
_FILES = 16  # open files, besides two pipes for each rank
_FULL = 1 << 20  # unsent bytes from which on ranks have to wait


def command(python: str, package: str) -> list[str]:
    """The command that starts an agent. package: the folder that contains this package, the same on all hosts."""
    code = "import sys; sys.path[:0] = sys.argv[1:2]; from hvdlite_launcher.agent import main; main()"
    return [python, "-I", "-S", "-c", code, package]


def main() -> None:
    """Serve one job, from hvdliterun's first message to the end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the job; the agent ends with the connection
    os.write(1, wire.MARK)
    Agent(wire.Link(1)).serve()


class Agent:
    """The agent of one job on this host.

    _job: what hvdliterun has said about the job (`Team`). _polled: lists the job's folder if the kernel does not report
    new files. _made: folders that the agent has made, outermost first. _pipes: kind of frame and rank of each open
    pipe. _ending: the signal that ends the job, or 0. _told: processes that have received that signal. _started: how
    many ranks have started.
    """

    def __init__(self, link: wire.Link) -> None:
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._job: dict[str, Any] = {}
        self._polled: Polled | None = None
        self._made: list[str] = []
        self._pipes: dict[int, tuple[int, int]] = {}
        self._segments = Segments("")
        self._told: set[int] = set()
        self._ending = 0
        self._started = 0
        self._over, self._paused = False, False

    def take(self, data: bytes) -> None:
        """Act on bytes from hvdliterun; no bytes mean that hvdliterun is gone."""
        for kind, _, frame in self._link.take(data):
            if kind == wire.TASK:
                self._publish("task", frame)
            else:
                self._hear(wire.decode(frame))
        self._over |= self._link.closed

    def _hear(self, message: dict[str, Any]) -> None:
        self._paused = "pause" in message
        if "job" in message:
            self._open(message["job"])
        if "told" in message:
            self._publish("told", str(message["told"]).encode())
        number = message.get("signal")
        if number in (signal.SIGINT, signal.SIGTERM):
            self._publish("ending", b"")
            self._ending = number
            self._end_ranks()
        elif number:
            send(rank_processes(self._folder), number)
        self._over |= "end" in message

    def serve(self) -> None:
        """Wait for a job, and work until its end; then clean up."""
        while not self._job:
            if not (data := os.read(0, _CHUNK)):
                return
            self.take(data)
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self._selector.register(0, selectors.EVENT_READ, lambda: self.take(os.read(0, _CHUNK)))
        patience = self._job["patience"]  # until a rank has started, and afterwards
        beaten, looked, pause = 0.0, 0.0, times.SEGMENTS_SOON
        try:
            while not self._over and (self._paused or self._link.silence < patience[self._started > 0]):
                began = time.monotonic()
                if began - beaten > times.BEAT:
                    beaten = began
                    self._say_arrivals(times.ABSENCE_SETTLED)
                if began - looked > pause:  # a look takes milliseconds
                    looked, pause = began, min(pause * 1.2, times.SEGMENTS_SELDOM)
                    self._segments.look()
                before = self._started
                self._turn(min(pause, times.BEAT / 2))
                if self._started > before:
                    pause = times.SEGMENTS_SOON
                if time.monotonic() - began > times.STANDSTILL:
                    self._link.forgive()
        finally:
            self._clean_up()
        self._say(gone=1)
        self._flush_all()
        os.closerange(0, 3)  # which ends the connection
        if not self._started:
            self._turn_away()
        see_off(self._mark())

    def _open(self, job: dict[str, Any]) -> None:
        """Make the job's folders, or take over those of an agent that died, and report whether the host is ready."""
        self._job, paths = job, [path for path in (job["folder"], job["shared"]) if path]
        try:
            _allow_files(2 * job["ranks"] + _FILES)
            for path in paths:
                self._made += list(job_folder.missing_parents(path))[::-1]
                if not job["successor"]:
                    job_folder.claim(path, job["parts"])
                self._made.append(path)
            self._segments = Segments(job_folder.part_of(job["folder"]))
            os.chdir(job["cwd"])
            job_folder.publish(self._folder, "watched", bytes(job_folder.ROOM))
            self._watch()
            self._ask()
        except FileExistsError as error:
            problem = "another host in the list is this machine, or has its name: name it once, with all slots [HVD017]"
            stranger = f"another user has made {path}: start again"
            self._say(problem=problem if job_folder.is_own(error.filename) else stranger)
        except OSError as error:
            where = error.filename or (self._folder if error.strerror else "")
            cure = "name another place in TMPDIR" if where.startswith(job["folder"]) else ""
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                cure = f"free some room there, or {cure}" if cure else "free some room there"
            elif where == job["cwd"]:
                cure = "start from a folder that all hosts have"
            self._say(problem=": ".join(filter(None, (error.strerror or str(error), where, cure))))

    def _watch(self) -> None:
        try:
            descriptor = watch(self._folder)
        except OSError:
            self._polled = Polled(self._folder)
        else:
            self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._look(appeared(descriptor)))

    def _ask(self) -> None:
        """Report that the host is ready. If other hosts take part, a child first finds the facts that must be the same
        on all hosts."""
        if not self._job["command"]:
            self._say(facts={}, name="")
            return
        import subprocess

        from hvdlite_launcher import facts

        facts.check_interfaces(self._job["interfaces"])
        env = {**os.environ, **self._job["env"]}
        child, name = facts.questions(self._job["command"], env), os.uname().nodename
        if child is None:
            self._say(facts={}, name=name)
            return
        pipe, null = subprocess.PIPE, subprocess.DEVNULL
        env["HVDLITE_JOB_ID"] = self._job["id"]
        asked = subprocess.Popen(child, env=env, stdin=null, stdout=pipe, stderr=pipe)
        assert asked.stdout is not None
        answer = asked.stdout.fileno()

        def listen() -> None:
            self._selector.unregister(answer)
            out, err = asked.communicate()
            found = facts.answers(out.decode(errors="replace"))
            last = err.decode(errors="replace").strip().splitlines()[-1:] or ["no answer"]
            if found:
                self._say(facts=found, name=name)
            else:
                self._say(problem=f"{child[0]} fails: {last[0]}: install it again, or name another Python")

        self._selector.register(answer, selectors.EVENT_READ, listen)

    def _turn(self, timeout: float) -> None:
        """Wait for an event and act on it. If hvdliterun is slow to take output, the ranks' pipes are left alone."""
        if self._link.unsent > _FULL:
            select.select([0], [1], [], timeout)
            self._link.send()
            timeout = 0.0
        full = self._link.unsent > _FULL
        if self._polled:
            timeout = min(timeout, times.POLL)
            self._look(self._polled.appeared())
        if sending := self._link.unsent:
            self._selector.register(1, selectors.EVENT_WRITE, self._link.send)
        for key, _ in self._selector.select(timeout):
            if not (full and key.fd in self._pipes):
                key.data()
        if sending:
            self._selector.unregister(1)

    def _look(self, news: Iterable[tuple[str, bool]]) -> None:
        """Act on new files of keepers and ranks in the job's folder."""
        for name, complete in news:
            kind, _, number = name.partition(".")
            if kind in job_folder.FILES and (number.isdigit() or not number):
                self._act(kind, int(number or 0), os.path.join(self._folder, name), complete)

    def _act(self, kind: str, rank: int, path: str, complete: bool) -> None:
        if not complete:
            if kind in ("out", "err"):
                pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
                self._pipes[pipe] = (wire.STDOUT if kind == "out" else wire.STDERR, rank)
                self._selector.register(pipe, selectors.EVENT_READ, lambda: self._carry(pipe))
        elif kind == "pid":
            self._started += 1
            self._say(started=rank)
            if self._ending:
                self._end_ranks()
        elif kind == "ended":
            self._say(ended=rank)
        elif kind == "failed":
            note = self._contents(path).decode("ascii", "replace")
            inside = os.path.exists(job_folder.path_of(self._folder, "entering", note.partition(" ")[0]))
            self._say(failed=note, inside=inside)
        elif kind == "swallowed":
            self._say(swallowed=self._contents(path).decode(errors="replace"), rank=rank)
        elif kind == "summary":
            self._say(summary=self._contents(path).decode(errors="replace"), rank=rank)
        elif kind == "result":
            self._link.send(wire.encode(wire.RESULT, rank, self._contents(path)))

    def _contents(self, path: str) -> bytes:
        with open(path, "rb") as file:
            return file.read()

    def _carry(self, pipe: int) -> bool:
        """Forward one chunk of a rank's output. Returns False if there is none."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if data:
            self._link.send(wire.encode(*self._pipes[pipe], data))
            return True
        self._selector.unregister(pipe)
        os.close(pipe)
        del self._pipes[pipe]
        return False

    def _end_ranks(self) -> None:
        """Send the signal that ends the job to each rank that has not received it."""
        ranks = rank_processes(self._folder)
        send([rank for rank in ranks if rank not in self._told], self._ending)
        self._told.update(ranks)

    def _publish(self, name: str, data: bytes) -> None:
        if self._folder:
            with contextlib.suppress(OSError):
                job_folder.publish(self._folder, name, data)

    def _say(self, **values: object) -> None:
        self._link.say(now=time.time(), **values)

    def _say_arrivals(self, settled: float) -> None:
        absent, waiting = job_folder.arrivals(self._folder, time.time(), settled)
        self._say(absent=absent, waiting=waiting)

    def _flush_all(self) -> None:
        """Send what is left, until hvdliterun has taken it or is gone. A terminal may keep hvdliterun from reading: its
        own agent waits as long as that takes. Another host's agent cannot tell that from a lost connection."""
        left, since = self._link.unsent, time.monotonic()
        while left and (self._job["whole"] or time.monotonic() - since < times.START_HOST_TIMEOUT):
            if (rest := self._link.send()) < left:
                left, since = rest, time.monotonic()
            else:
                time.sleep(0.005)

    @property
    def _folder(self) -> str:
        return self._segments.folder

    def _mark(self) -> bytes:
        return mark_of(self._job["id"], self._job["env"], os.environ)

    def _clean_up(self) -> None:
        """Kill the job's processes, read the rest of their output and reports, and remove the job's files. No step
        waits for hvdliterun."""
        self._say_arrivals(0.0)
        self._segments.look(last=True)
        kill_all(self._mark())
        self._turn(0)
        for pipe in list(self._pipes):
            while self._link.unsent < 64 * _FULL and self._carry(pipe):
                pass
        self._segments.remove()
        self._remove()

    def _remove(self) -> None:
        for path in reversed(self._made):
            if path in (self._job["folder"], self._job["shared"]):
                job_folder.leave(path, self._job["whole"])
            else:
                with contextlib.suppress(OSError):  # not empty: in use by another job
                    os.rmdir(path)

    def _turn_away(self) -> None:
        """Clean up after a daemon of the MPI that arrives late, as no rank has started here. Open MPI's daemon makes
        the job's folder again."""
        deadline = time.monotonic() + times.LATE_DAEMON
        while time.monotonic() < deadline:
            time.sleep(0.1)
            kill_all(self._mark())
            self._remove()


def _allow_files(wanted: int) -> None:
    """Let this process open so many files. Raises OSError."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if 0 <= most < wanted:  # -1: no limit
        raise OSError("Too many open files: each rank here takes two: raise `ulimit -n`, or start fewer")
