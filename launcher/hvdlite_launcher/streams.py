"""The pipes of one job: each rank's stdout and stderr, and what mpirun itself has to say.

The ranks write into named pipes in the job's folder and not through mpirun, so both MPIs look alike and
no last line is lost when an MPI ends a job. mpirun's own messages are held back for a while, since most
come with a rank's death, which is told in one line.
"""

from __future__ import annotations

import os
import re
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from hvdlite_launcher.command import Place
from hvdlite_launcher.notices import without_deaths, without_harmless
from hvdlite_launcher.output import PARTIAL_WAIT, Printer, Source, write_all

_CHUNK = 65536
_TICK = 0.25  # seconds that a wait may last
_NOTICES_HELD = 5.0  # seconds
_LABEL = re.compile(rb"\s*(\d+): ?")
_USELESS = b"lacks support for cpu binding\n"  # srun's answer to our wish for none
Listener = Callable[[bytes], None]


@dataclass
class Streams:
    """Reads all pipes of a job and prints them.

    verbose: show every message of mpirun, at once.
    first_output: the monotonic time of the first output of a rank, or None.
    broken: why our output cannot be written any more. hear: is given each line from a scheduler's pipes.
    _held: mpirun's messages that have not been shown yet, the oldest of them since `_since`.
    """

    printer: Printer
    verbose: bool = False
    first_output: float | None = None
    broken: OSError | None = None
    hear: Callable[[bytes], None] = lambda line: None
    _ranks: dict[tuple[int, int], Source] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _held: bytes = b""
    _since: float = 0.0

    def open_ranks(self, place: Place, ranks: int) -> None:
        """Make the named pipes of all ranks."""
        for rank in range(ranks):
            for destination, name in ((1, "out"), (2, "err")):
                path = os.path.join(place.folder, f"{name}.{rank}")
                os.mkfifo(path, 0o600)
                # For writing too: a pipe without a writer would count as ended before the rank opens it.
                pipe = os.open(path, os.O_RDWR)
                self.add(pipe, partial(self._feed, self._source(rank, destination)))

    def open_notices(self) -> int:
        """Make the pipe for mpirun's own stdout and stderr; returns the end to write to."""
        pipe, end = os.pipe()
        self.add(pipe, self._notice)
        return end

    def open_labelled(self, destination: int) -> int:
        """Make the pipe for output of ranks behind labels, `2: text`; what has none is a notice. Returns the end to
        write to."""
        pipe, end = os.pipe()
        rest = b""

        def listen(data: bytes) -> None:
            nonlocal rest
            if data:
                *whole, rest = (rest + data).split(b"\n")  # not at a progress bar's \r
                lines = [line + b"\n" for line in whole]
            else:
                lines, rest = [rest], b""
            for line in lines:
                label = _LABEL.match(line)
                self.hear(line)
                if label and b"slurmstepd" not in line:
                    self.output(int(label[1]), destination, line[label.end() :])
                elif not line.endswith(_USELESS):
                    self._notice(line)

        self.add(pipe, listen)
        return end

    def output(self, rank: int, destination: int, data: bytes) -> None:
        """Print what a rank on another host has written. destination: 1 for its stdout, 2 for its stderr."""
        self._feed(self._source(rank, destination), data)

    def say(self, text: str) -> None:
        """Print a line of hvdliterun's own to stderr."""
        self._guarded(self.printer.end_lines)
        self._guarded(lambda: write_all(2, f"hvdliterun: {text}\n".encode()))

    def add(self, pipe: int, listener: Listener) -> None:
        """Read this pipe too, and give what comes to the listener; nothing: the pipe has ended."""
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe, listener))

    def add_door(self, door: int, serve: Callable[[], None]) -> None:
        """Call `serve` when somebody has come to this socket."""
        os.set_blocking(door, False)
        self._selector.register(door, selectors.EVENT_READ, serve)

    def remove_door(self, door: int) -> None:
        """Before it is closed."""
        self._selector.unregister(door)

    def wait(self) -> None:
        """Print what has come; returns at once after output or a signal, and in any case soon."""
        timeout = PARTIAL_WAIT / 2 if any(source.rest for source in self._ranks.values()) else _TICK
        for key, _ in self._selector.select(timeout):
            key.data()
        self._guarded(self._flush_old)

    def drain(self, explained: bool) -> None:
        """Print all that is left, and close. To be called when the job's processes are gone.

        explained: the end of the job is told in our own words, so mpirun need not report it.
        """
        for key in list(self._selector.get_map().values()):
            while key.data():
                pass
        self._guarded(lambda: self._flush_all(without_reports=explained and not self.verbose))
        self.close()

    def close(self) -> None:
        """Close all pipes, if that has not been done."""
        for key in list((self._selector.get_map() or {}).values()):
            os.close(key.fd)
        self._selector.close()

    def _source(self, rank: int, destination: int) -> Source:
        return self._ranks.setdefault((rank, destination), Source(rank, destination))

    def _read(self, pipe: int, listener: Listener) -> bool:
        """Take one chunk; False when there is none."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
        listener(data)
        return bool(data)

    def _feed(self, source: Source, data: bytes) -> None:
        self.first_output = self.first_output or time.monotonic()
        self._guarded(lambda: self.printer.feed(source, data))

    def _notice(self, data: bytes) -> None:
        self._since = self._since if self._held else time.monotonic()
        self._held += data

    def _flush_old(self) -> None:
        for source in self._ranks.values():
            self.printer.flush(source, PARTIAL_WAIT)
        if self._held and (self.verbose or time.monotonic() - self._since > _NOTICES_HELD):
            self._tell_held()

    def _flush_all(self, without_reports: bool) -> None:
        for source in self._ranks.values():
            self.printer.flush(source)
        self._tell_held(without_reports)

    def _tell_held(self, without_reports: bool = False) -> None:
        text, self._held = self._held.decode(errors="replace"), b""
        text = without_harmless(text.replace("\0", ""))  # Open MPI ends some of its messages so
        self.printer.end_lines()
        write_all(2, (without_deaths(text) if without_reports else text).encode())

    def _guarded(self, act: Callable[[], None]) -> None:
        if not self.broken:
            try:
                act()
            except OSError as error:
                self.broken = error
