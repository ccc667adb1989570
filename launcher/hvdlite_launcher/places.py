"""Where output goes: a pipe or a file (`Lines`), a terminal (`Screen`), or unchanged to anywhere (`Raw`).

One process writes everything, so lines of different ranks never mix. They differ in unfinished lines. In a pipe or a
file another rank's line ends them, and of a progress bar only one refresh a second is written, as a line. On a terminal
unfinished lines are the last ones on the screen: other ranks' lines are written above them.
"""

import os
import re
import select
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hvdlite_launcher.live import Block, columns, is_blank, moves_cursor
from hvdlite_launcher.terminal import size

_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r|\Z)")
_LEADING = re.compile(rb"(?:\x1b\[[0-9;]*[A-HJK])+")  # of a refresh, to move the cursor or to erase the row
_RISING = re.compile(rb"(?:\x1b\[A)+\Z")  # after the row of an inner progress bar, back to the row of the outer one
_REFRESH = 1.0  # seconds between two refreshes of a progress bar in a pipe or a file
_TAIL = 8192  # bytes of finished lines that a progress bar of several rows may still change
Key = tuple[int, int]
"""A stream: the rank, and 1 for its stdout or 2 for its stderr."""
Label = Callable[[Key], bytes]


class Place(Protocol):
    """Where output goes."""

    def write(self, key: Key, text: bytes, more: bool) -> None:
        """Print the text of a stream: whole lines, or also an unfinished line that has waited long enough.

        more: the beginning of another line has come, too, and waits.
        """

    def catch_up(self, key: Key, last: bool) -> None:
        """Print what was held back, if it is time. last: nothing of this stream will follow soon."""

    def tell(self, destination: int, text: bytes) -> None:
        """Print lines of hvdliterun's own."""

    def end(self) -> None:
        """End unfinished lines, so that other text begins on a line of its own."""


class Raw:
    """Passes all bytes unchanged."""

    def write(self, key: Key, text: bytes, more: bool) -> None:
        """Print the text."""
        write_all(key[1], text)

    def catch_up(self, key: Key, last: bool) -> None:
        """Print what was held back: nothing."""

    def tell(self, destination: int, text: bytes) -> None:
        """Print lines of hvdliterun's own."""
        write_all(destination, text)

    def end(self) -> None:
        """End unfinished lines: bytes pass unchanged, so nothing is added."""


@dataclass
class Bar:
    """A progress bar of one stream, in a pipe or a file.

    running: the stream's text replaces an earlier text of the same line. text: what has come of the line since the last
    carriage return. kept: the last refresh, if it is not written yet. shown: the refresh whose line is not ended yet;
    empty if there is none. at: when the last refresh was written. risen: the cursor has moved up, so that a newline may
    only move it down again.
    """

    running: bool = False
    text: bytes = b""
    kept: bytes = b""
    shown: bytes = b""
    at: float = -_REFRESH
    risen: bool = False

    def begin(self) -> None:
        """The text after an open line's carriage return will replace it."""
        self.running = True

    def refresh(self, text: bytes, ended: bool) -> None:
        """Note a refresh, or a part of it. ended: a carriage return follows. A blank one only clears the line."""
        self.text += text
        if not is_blank(self.text):
            row = _LEADING.sub(b"", self.text, count=1) if self.text[:1] == b"\x1b" else self.text
            self.kept = _RISING.sub(b"", row) if row[-1:] == b"A" else row
        self.running = True
        if ended:
            self.risen = self.risen or _RISING.search(self.text) is not None
            self.text = b""

    def descend(self, text: bytes) -> bool:
        """Whether the newline at the end of this text only moves the cursor down again. The text is noted then."""
        row = self.text + text.rstrip(b"\r\n")
        down = self.running and (_RISING.search(row) is not None or (self.risen and is_blank(row)))
        if down:
            self.refresh(text.rstrip(b"\r\n"), ended=True)
        return down

    def finish(self, text: bytes) -> bytes:
        """The line ends with this text. Returns the last state, without the end of the line."""
        self.refresh(text.rstrip(b"\r\n"), ended=True)
        last, self.kept, self.running, self.risen = self.kept, b"", False, False
        return last

    def show(self) -> None:
        """The last refresh is being written."""
        self.shown, self.kept, self.at = self.kept, b"", time.monotonic()

    def end(self) -> None:
        """The line with the refresh is ended."""
        self.shown = b""


@dataclass
class Lines:
    """A pipe or a file. label: the beginning of a stream's lines. _open: the stream whose line is not ended."""

    label: Label
    _open: Key | None = None
    _bars: dict[Key, Bar] = field(default_factory=dict)

    def write(self, key: Key, text: bytes, more: bool) -> None:
        """Print the text. `catch_up` prints refreshes of a progress bar."""
        bar = self._bars.get(key)
        if not (bar and bar.running) and not (b"\r" in text and b"\r" in text.replace(b"\r\n", b"\n")):
            write_all(key[1], self._lines(key, text))
            return
        bar = self._bars.setdefault(key, Bar())
        write_all(key[1], b"".join([self._segment(key, bar, each) for each in _SEGMENT.findall(text) if each]))

    def catch_up(self, key: Key, last: bool) -> None:
        """Print the last refresh of a progress bar, in a line of its own, if it is time."""
        bar = self._bars.get(key)
        if bar and bar.kept and (last or time.monotonic() - bar.at >= _REFRESH):
            more = self._open == key and bar.shown and bar.kept.startswith(bar.shown)
            out = bar.kept[len(bar.shown) :] if more else self._ended() + self._lines(key, bar.kept)
            bar.show()
            write_all(key[1], out)

    def tell(self, destination: int, text: bytes) -> None:
        """Print lines of hvdliterun's own."""
        if text:
            write_all(destination, self._ended() + text)

    def end(self) -> None:
        """End the unfinished line."""
        if self._open is not None:
            write_all(self._open[1], self._ended())

    def _lines(self, key: Key, text: bytes) -> bytes:
        """The text with a label before each line. It goes on in the open line, if that is this stream's."""
        label = self.label(key)
        start = b"" if self._open == key else self._ended() + label
        whole = text.endswith(b"\n")
        self._open = None if whole else key
        if not whole:
            return start + text.replace(b"\n", b"\n" + label)
        return start + text[:-1].replace(b"\n", b"\n" + label) + b"\n"

    def _ended(self) -> bytes:
        """What ends the unfinished line."""
        if self._open is None:
            return b""
        if bar := self._bars.get(self._open):
            bar.end()
        self._open = None
        return b"\n"

    def _segment(self, key: Key, bar: Bar, text: bytes) -> bytes:
        """What to write of a line, or of a part of it up to a carriage return."""
        if text.endswith(b"\n"):
            if bar.descend(text):
                return b""
            return self._last(key, bar, text) if bar.running else self._lines(key, text)
        row = text.rstrip(b"\r\x08")
        if not bar.running and self._open == key:
            bar.begin()
            return row
        bar.refresh(row, ended=text.endswith(b"\r"))
        return b""

    def _last(self, key: Key, bar: Bar, text: bytes) -> bytes:
        """The end of a progress bar's line."""
        row = bar.finish(text)
        if self._open == key and (not row or (bar.shown and row.startswith(bar.shown))):
            return row[len(bar.shown) :] + self._ended()
        return self._ended() + self._lines(key, row + b"\n")


@dataclass
class Screen:
    """A terminal. Unfinished lines of all streams stand below the finished ones, and are drawn again when needed.

    label: the beginning of a stream's lines. _drawn: the unfinished rows as they stand on the screen; the cursor is at
    the end of the last one. _tail: the last finished rows of the stream _tail_of, if nothing has followed them.
    _hidden: a rank has hidden the cursor.
    """

    label: Label
    _blocks: dict[Key, Block] = field(default_factory=dict)
    _drawn: list[bytes] = field(default_factory=list)
    _tail_of: Key | None = None
    _tail: bytes = b""
    _hidden: int = 0

    def write(self, key: Key, text: bytes, more: bool) -> None:
        """Print the text."""
        block = self._blocks.get(key)
        if block is None and text.endswith(b"\n") and not moves_cursor(text):
            self._finish(key, text)
            label = self.label(key)
            lines = label + text[:-1].replace(b"\n", b"\n" + label) + b"\n"
            if self._blocks or self._drawn:
                self._draw(key[1], lines)
            else:
                write_all(key[1], lines)
            return
        block = self._blocks.setdefault(key, Block())
        done, others = block.take(text, more, lambda count: self._reclaim(key, count))
        if b"\x1b[?25" in others:
            self._hidden = key[1] if others.rfind(b"\x1b[?25l") > others.rfind(b"\x1b[?25h") else 0
        self._print(key, done, others)

    def catch_up(self, key: Key, last: bool) -> None:
        """Print what was held back: nothing."""

    def tell(self, destination: int, text: bytes) -> None:
        """Print lines of hvdliterun's own, above unfinished lines."""
        if text:
            self._tail_of = None
            self._draw(destination, text if text.endswith(b"\n") else text + b"\n")

    def end(self) -> None:
        """End unfinished lines, and show the cursor again."""
        last = next(reversed(self._blocks), None)
        if last and self._drawn:
            write_all(last[1], b"\x1b[0m\n" if b"\x1b" in self._drawn[-1] else b"\n")
        if self._hidden:
            write_all(self._hidden, b"\x1b[?25h")
        self._blocks.clear()
        self._drawn, self._tail_of, self._hidden = [], None, 0

    def _print(self, key: Key, done: list[bytes], others: bytes = b"") -> None:
        """Print finished rows of a stream, and draw the unfinished ones."""
        block, label = self._blocks[key], self.label(key)
        if done:
            self._finish(key, b"".join(row + b"\n" for row in done))
        if block.rows == [b""]:
            del self._blocks[key]
        self._draw(key[1], b"".join(label + row + b"\n" for row in done), others)

    def _finish(self, key: Key, text: bytes) -> None:
        """Remember finished rows, which a progress bar may still change."""
        before = self._tail if self._tail_of == key and len(text) < _TAIL else b""
        self._tail_of, self._tail = key, (before + text)[-_TAIL:]

    def _reclaim(self, key: Key, count: int) -> list[bytes]:
        """At most so many finished rows of a stream that nothing has followed, to be drawn again."""
        if self._tail_of != key:
            return []
        most, height = size(key[1]) or (80, 24)
        *rows, _ = self._tail.split(b"\n")
        label, found = self.label(key), 0
        while found < min(count, len(rows), height - 2) and columns(label + rows[-1 - found]) <= most:
            found += 1
        taken = rows[len(rows) - found :]
        self._tail = b"".join(row + b"\n" for row in rows[: len(rows) - found])
        self._drawn = [label + row for row in taken] + (self._drawn or [b""])
        return taken

    def _draw(self, destination: int, done: bytes, others: bytes = b"") -> None:
        """Write finished lines where the unfinished ones begin, and those below."""
        most, height = size(destination) or (80, 24)
        done += self._overflow(most, height)
        rows = [self.label(key) + row for key, block in self._blocks.items() for row in block.shown()]
        new, old = done + b"\n".join(rows), b"\n".join(self._drawn)
        if new.startswith(old):  # nothing to erase; the user may have typed an answer there
            out = new[len(old) :]
        else:
            up = sum(_lines(row, most) for row in self._drawn) - 1
            out = b"\r" + (b"\x1b[%dA" % up if up else b"") + b"\x1b[J" + new
        self._drawn = rows
        if out or others:
            write_all(destination, others + out)

    def _overflow(self, most: int, height: int) -> bytes:
        """Finish the uppermost unfinished rows if they do not fit on the screen."""
        done = b""
        for key, block in self._blocks.items():
            while block.shown() and self._height(most) >= height:
                done += self.label(key) + block.cut() + b"\n"
                self._tail_of = None
        return done

    def _height(self, most: int) -> int:
        return sum(_lines(self.label(key) + row, most) for key, block in self._blocks.items() for row in block.shown())


def _lines(row: bytes, most: int) -> int:
    """How many lines of a terminal a row takes."""
    return max(1, -(-columns(row) // most))


def write_all(destination: int, data: bytes) -> None:
    """Write all bytes, and wait while the destination takes none. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(destination, view) :]
        except BlockingIOError:
            select.select([], [destination], [])
