"""A small terminal: what a person sees after these bytes."""

from __future__ import annotations

import re

_TOKENS = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|(.)", re.DOTALL)


class Grid:
    """A terminal of so many columns that keeps every line. Colours are not shown."""

    def __init__(self, columns: int = 60) -> None:
        self.columns = columns
        self.rows = [""]
        self.at, self.column = 0, 0
        self.cursor = True

    def feed(self, data: bytes) -> Grid:
        """Draw these bytes, and return this terminal."""
        for count, act, letter in _TOKENS.findall(data.decode()):
            if letter:
                self._put(letter)
            else:
                self._obey(act, count)
        return self

    @property
    def seen(self) -> list[str]:
        """The lines, without blanks at their ends, and without empty ones at the end."""
        rows = [row.rstrip() for row in self.rows]
        while rows and not rows[-1]:
            rows.pop()
        return rows

    def _put(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n":
            self._down()
            self.column = 0
        elif letter == "\b":
            self.column = max(0, self.column - 1)
        else:
            if self.column == self.columns:
                self._down()
                self.column = 0
            row = self.rows[self.at].ljust(self.column)
            self.rows[self.at] = row[: self.column] + letter + row[self.column + 1 :]
            self.column += 1

    def _down(self) -> None:
        self.at += 1
        if self.at == len(self.rows):
            self.rows.append("")

    def _obey(self, act: str, count: str) -> None:
        if act == "A":
            self.at = max(0, self.at - int(count or 1))
        elif act == "K":
            self.rows[self.at] = "" if count == "2" else self.rows[self.at][: self.column]
        elif act == "J":
            assert not count
            self.rows[self.at] = self.rows[self.at][: self.column]
            del self.rows[self.at + 1 :]
        elif count in ("?25l", "?25h"[1:], "?25"):
            self.cursor = act == "h"
        else:
            assert act in "mlh", f"{count}{act}"
