"""How lines of the ranks' output begin.

Programs that read hvdliterun's output know Horovod's form, `[2]<stdout>:text`, so pipes and files have that. On a
terminal the form is short: `2|text` on stdout, `2:text` on stderr. Each rank has a colour, and on stderr it is dim.
"""

import os
import time
from dataclasses import dataclass
from enum import Enum

from hvdlite_launcher.terminal import has_colours, is_terminal

_COLOURS = (36, 33, 35, 94)
"""Cyan, yellow, magenta and bright blue: people who cannot tell red from green can tell these apart."""
_STREAMS = {1: "stdout", 2: "stderr"}


class Style(Enum):
    """The values of --prefix. Without that flag a terminal gets SHORT, and pipes and files get FULL.

    AUTO is the same, but lines have no prefix until another rank than rank 0 writes.
    """

    SHORT = "short"
    FULL = "full"
    AUTO = "auto"
    NONE = "none"


@dataclass
class Prefixes:
    """The beginnings of lines.

    style: None if the user has not chosen one. timestamps: whether the time comes first. ranks: how many there are.
    alone: no rank but rank 0 has written.
    """

    style: Style | None = None
    timestamps: bool = False
    ranks: int = 1
    alone: bool = True

    def __post_init__(self) -> None:
        self._width = len(str(self.ranks - 1))
        self._short = {each: self._is_short(each) for each in _STREAMS}
        self._coloured = {each: has_colours(each, os.environ) for each in _STREAMS}
        self._made: dict[tuple[int, int], bytes] = {}

    def join(self) -> None:
        """Another rank than rank 0 writes."""
        self.alone = False
        self._made.clear()

    def of(self, key: tuple[int, int]) -> bytes:
        """The beginning of a line of a stream: of the rank's stdout (1) or stderr (2)."""
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(*key).encode()
        return self._time(key[1]) + made if self.timestamps else made

    def width(self, destination: int) -> int:
        """How many columns a prefix takes at most."""
        if self.style is Style.NONE:
            return 9 if self.timestamps else 0
        if self._short[destination]:
            return self._width + 1 + (9 if self.timestamps else 0)
        return len(f"[{self.ranks - 1}]<stdout>:") + (len(time.asctime()) if self.timestamps else 0)

    def _is_short(self, destination: int) -> bool:
        chosen = {Style.SHORT: True, Style.FULL: False}
        return chosen[self.style] if self.style in chosen else is_terminal(destination)

    def _without_rank(self) -> bool:
        return self.style is Style.NONE or (self.style is Style.AUTO and self.alone)

    def _time(self, destination: int) -> bytes:
        short = self._short[destination] or self._without_rank()
        return (time.strftime("%H:%M:%S ") if short else time.asctime()).encode()

    def _make(self, rank: int, destination: int) -> str:
        if self._without_rank():
            return ""
        if not self._short[destination]:
            return f"[{rank}]<{_STREAMS[destination]}>:"
        text = f"{rank:>{self._width}}{'|' if destination == 1 else ':'}"
        if not self._coloured[destination]:
            return text
        dim = ";2" if destination == 2 else ""
        return f"\x1b[0{dim};{_COLOURS[rank % len(_COLOURS)]}m{text}\x1b[0m"
