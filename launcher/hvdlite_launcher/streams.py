"""hvdliterun's event loop: waits for all its pipes, and acts on the bytes that arrive.

Rank output goes to `output.Printer`, which forms the lines. Under mpirun it comes from agents, so that all MPIs look
the same, and no last line is lost when an MPI ends a job. Under a scheduler it comes from srun, jsrun or flux, which
label each line. mpirun's own messages are held back for a while. Most come with a rank's death, which hvdliterun
reports in one line.
"""

import os
import re
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hvdlite_launcher.notices import without_deaths, without_harmless
from hvdlite_launcher.output import Printer, Source
from hvdlite_launcher.times import LOOP, MPIS_MESSAGES, UNFINISHED_LINE

_CHUNK = 1 << 20
_LABEL = re.compile(rb"\s*(\d+): ?")
_USELESS = b"lacks support for cpu binding\n"  # srun's answer to our wish for none
Listener = Callable[[bytes], None]


@dataclass
class Streams:
    """Reads all pipes of hvdliterun, and prints what the ranks and mpirun have written.

    verbose: print every message of mpirun at once. first_output: when a rank wrote first (`time.monotonic`), or None.
    broken: why hvdliterun's output cannot be written any more, or None. _held: messages of mpirun that have not been
    printed. _since: when the oldest of them came.
    """

    printer: Printer
    verbose: bool = False
    first_output: float | None = None
    broken: OSError | None = None
    _ranks: dict[tuple[int, int], Source] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _held: bytes = b""
    _since: float = 0.0

    def open_notices(self) -> int:
        """Make a pipe for messages of mpirun. Returns the end to write to."""
        pipe, end = os.pipe()
        self.add(pipe, self._notice)
        return end

    def open_labelled(self, destination: int, hear: Listener = lambda line: None) -> int:
        """Make a pipe for a scheduler's output. A line of rank 2 begins with `2: `; other lines are messages.

        Returns the end to write to. destination: 1 or 2. hear: is called with each line.
        """
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
                hear(line)
                if label and b"slurmstepd" not in line:
                    self.output(int(label[1]), destination, line[label.end() :])
                elif not line.endswith(_USELESS):
                    self._notice(line)

        self.add(pipe, listen)
        return end

    def output(self, rank: int, destination: int, data: bytes) -> None:
        """Print what a rank has written to its stdout (destination 1) or stderr (2)."""
        source = self._ranks.setdefault((rank, destination), Source(rank, destination))
        self.first_output = self.first_output or time.monotonic()
        self._guarded(lambda: self.printer.feed(source, data))

    def say(self, text: str) -> None:
        """Print a line of hvdliterun to stderr."""
        self._guarded(lambda: self.printer.tell(f"hvdliterun: {text}\n"))

    def add(self, pipe: int, listener: Listener) -> None:
        """Call the listener with what comes from this pipe, and with no bytes when the pipe has ended."""
        os.set_blocking(pipe, False)
        self._selector.register(pipe, selectors.EVENT_READ, lambda: self._read(pipe, listener))

    def add_door(self, door: int, serve: Callable[[], None]) -> None:
        """Call `serve` when a process connects to this socket."""
        os.set_blocking(door, False)
        self._selector.register(door, selectors.EVENT_READ, serve)

    def remove_door(self, door: int) -> None:
        """Watch this socket no longer. Call it before the socket is closed."""
        self._selector.unregister(door)

    def wait(self) -> None:
        """Wait for an event, for LOOP at most, and print what has come."""
        timeout = UNFINISHED_LINE / 2 if any(source.rest for source in self._ranks.values()) else LOOP
        for key, _ in self._selector.select(timeout):
            key.data()
        self._guarded(self._flush_old)

    def drain(self, explained: bool) -> None:
        """Print the rest and close all pipes. The job's processes must be gone.

        explained: hvdliterun explains the end of the job, so that mpirun's reports of deaths are left out.
        """
        for key in list(self._selector.get_map().values()):
            while key.data():
                pass
        self._guarded(lambda: self._flush_all(without_reports=explained and not self.verbose))
        self.close()

    def close(self) -> None:
        """Close all pipes that are open."""
        for key in list((self._selector.get_map() or {}).values()):
            os.close(key.fd)
        self._selector.close()

    def _read(self, pipe: int, listener: Listener) -> bool:
        """Take one chunk of a pipe. Returns False if there is none."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._selector.unregister(pipe)
            os.close(pipe)
        listener(data)
        return bool(data)

    def _notice(self, data: bytes) -> None:
        self._since = self._since if self._held else time.monotonic()
        self._held += data

    def _flush_old(self) -> None:
        for source in self._ranks.values():
            self.printer.flush(source, UNFINISHED_LINE)
        if self._held and (self.verbose or time.monotonic() - self._since > MPIS_MESSAGES):
            self._tell_held(without_reports=False)

    def _flush_all(self, without_reports: bool) -> None:
        for source in self._ranks.values():
            self.printer.flush(source)
        self.printer.end_lines()
        self._tell_held(without_reports)

    def _tell_held(self, without_reports: bool) -> None:
        text, self._held = self._held.decode(errors="replace"), b""
        text = without_harmless(text.replace("\0", ""))  # Open MPI ends some of its messages so
        self.printer.tell(without_deaths(text) if without_reports else text)

    def _guarded(self, act: Callable[[], None]) -> None:
        if not self.broken:
            try:
                act()
            except OSError as error:
                self.broken = error
