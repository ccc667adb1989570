"""A rank's unfinished lines on a terminal: a progress bar, a prompt, or the rows that rich draws again and again.

A `Block` reads what a rank writes and remembers the rows that the rank may still change. It understands the control
sequences of progress bars: the carriage return, the backspace, moves up and down, and erasing. Colours stay part of a
row. Other sequences are passed on at once. It is no terminal emulator: text after a carriage return replaces the row,
because every progress bar writes its whole row.
"""

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field

_TOKENS = re.compile(
    rb"(?P<move>\r|\n|\x08+)|\x1b\[(?P<count>[0-9;]*)(?P<act>[A-Za-z@`])|(?P<text>[^\r\n\x08\x1b]+)|(?P<other>"
    rb"\x1b\[[?<=>][0-9;]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?)",
    re.DOTALL,
)
_SEQUENCES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.?|[\x00-\x08\x0b-\x1f]")
_MOVES = re.compile(rb"\r(?!\n)|\x08|\x1b(?!\[[0-9;]*m)")


def moves_cursor(text: bytes) -> bool:
    """Whether this text does more than add lines, perhaps coloured ones."""
    return _MOVES.search(text) is not None


def is_blank(row: bytes) -> bool:
    """Whether the row shows nothing."""
    return not _SEQUENCES.sub(b"", row).strip()


def columns(row: bytes) -> int:
    """How many columns the row takes on a terminal."""
    text = _SEQUENCES.sub(b"", row).decode(errors="replace").expandtabs()
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)


@dataclass
class Block:
    """Rows of one stream that may still change.

    rows: without their prefix; the cursor is in the row `at`. _fresh: the next text replaces that row. _back: how many
    characters the next text replaces. _height: the number of rows when the cursor last moved up. _done: rows that have
    been finished while a text is read.
    """

    rows: list[bytes] = field(default_factory=lambda: [b""])
    at: int = 0
    _fresh: bool = False
    _back: int = 0
    _height: int = 1
    _done: list[bytes] = field(default_factory=list)

    def take(self, text: bytes, more: bool, reclaim: Callable[[int], list[bytes]]) -> tuple[list[bytes], bytes]:
        """Read what the rank has written.

        Args:
            text: The bytes.
            more: Whether the beginning of another line has come, too. Otherwise all rows are finished after a newline.
            reclaim: Gives back at most so many rows that this stream has finished last, if nothing has followed them.

        Returns:
            Rows that are finished, and control sequences that are none of the rows'.
        """
        others = b""
        for token in _TOKENS.finditer(text):
            if token["text"] is not None:
                self._append(token[0])
            elif token["move"] is not None:
                self._move(token[0])
            elif token["other"] is not None and not token[0].startswith(b"\x1b]8;"):  # which is a link's text
                others += token[0]
            elif token["act"] in (None, b"m") or not self._obey(token["act"], token["count"], reclaim):
                self._append(token[0])
        if not more and self.at == len(self.rows) - 1 and is_blank(self.rows[-1]):
            self._height = 1
            self._release()
        done, self._done = self._done, []
        return done, others

    def shown(self) -> list[bytes]:
        """The rows to draw: no blank ones at the end."""
        last = max((number for number, row in enumerate(self.rows) if not is_blank(row)), default=-1)
        return self.rows[: last + 1]

    def cut(self) -> bytes:
        """Finish the first row, because the terminal has no room for all rows."""
        first = self.rows.pop(0)
        self.rows = self.rows or [b""]
        self.at = max(0, self.at - 1)
        return first

    def _append(self, text: bytes) -> None:
        row = b"" if self._fresh else self.rows[self.at]
        if self._back:
            row = row.decode(errors="surrogateescape")[: -self._back].encode(errors="surrogateescape")
        self._fresh, self._back = False, 0
        self.rows[self.at] = row + text

    def _move(self, token: bytes) -> None:
        if token == b"\r":
            self._fresh, self._back = True, 0
        elif token[:1] == b"\x08":
            self._back += len(token)
        else:
            self._down()

    def _down(self) -> None:
        self.at += 1
        self._back = 0
        self._fresh = self.at < len(self.rows)
        if not self._fresh:
            self.rows.append(b"")
            self._release()

    def _release(self) -> None:
        """Finish the uppermost rows; as many stay as the rank has last drawn again."""
        cut = max(0, len(self.rows) - self._height)
        self._done += self.rows[:cut]
        self.rows, self.at = self.rows[cut:], self.at - cut

    def _obey(self, act: bytes, count: bytes, reclaim: Callable[[int], list[bytes]]) -> bool:
        """Carry out a control sequence. Returns False for one that stays part of the row."""
        number = int(count[:9]) if count.isdigit() else 1
        if act in (b"A", b"F"):
            self._climb(number, reclaim)
        elif act in (b"B", b"E"):
            self.at, self._fresh = min(self.at + number, len(self.rows) - 1), True
        elif act == b"K":
            if self._fresh or count in (b"1", b"2"):
                self.rows[self.at] = b""
        elif act == b"J":
            del self.rows[self.at + 1 :]
            if self._fresh:
                self.rows[self.at] = b""
        elif act == b"D":
            self._back += number
        elif act == b"G" and number == 1:
            self._fresh, self._back = True, 0
        else:
            return False
        return True

    def _climb(self, number: int, reclaim: Callable[[int], list[bytes]]) -> None:
        while number > self.at and self._done:
            self.rows.insert(0, self._done.pop())
            self.at += 1
        if number > self.at:
            older = reclaim(number - self.at)
            self.rows, self.at = older + self.rows, self.at + len(older)
        self.at = max(0, self.at - number)
        self._fresh, self._back = True, 0
        self._height = len(self.rows)
