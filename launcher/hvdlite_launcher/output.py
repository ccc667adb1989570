"""Prints the ranks' output. Each line begins with its rank (`prefixes`), and goes to a pipe or a terminal (`places`).

A source's bytes are printed up to the last end of a line: `\\n`, or the `\\r` of a progress bar. The beginning of a
line (a prompt) waits for UNFINISHED_LINE, because most lines come in pieces. Rows that a rank draws again, after it
has moved the cursor up, do not wait: the last one ends without a newline, and the next refresh begins by erasing it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from dataclasses import dataclass, field

from hvdlite_launcher.places import Key, Lines, Place, Raw, Screen, write_all
from hvdlite_launcher.prefixes import Prefixes, Style
from hvdlite_launcher.terminal import can_redraw

_CLIMB = re.compile(rb"\x1b\[\d*[AF]")
_PART = re.compile(rb"(?:\r|\x1b(?:\[[\d;?]*)?)\Z")  # of \r\n, or of a control sequence
_LONGEST = 1 << 20  # bytes of a line that are held back; other ranks' lines may cut a longer one


@dataclass
class Source:
    """One stream of one rank. rest: what came after the last end of a line. since: when the first byte of it came."""

    rank: int
    destination: int
    rest: bytes = b""
    since: float = 0.0

    def __post_init__(self) -> None:
        self.key: Key = (self.rank, self.destination)

    def completed(self, data: bytes) -> bytes:
        """The lines, or parts of them up to a `\\r`, that these bytes complete. The rest waits for more."""
        text = self.rest + data
        if text.endswith(b"\n"):
            self.rest = b""
            return text
        self.since = self.since if self.rest else time.monotonic()
        if _CLIMB.search(data):
            part = _PART.search(text)
            end = part.start() if part else len(text)
        elif b"\n" in data or b"\r" in data or self.rest.endswith(b"\r"):
            end = 1 + max(text.rfind(b"\n"), text.rfind(b"\r", 0, -1))  # a last \r may still become \r\n
        else:
            end = 0  # the whole text is not searched again
        self.rest = text[end:]
        if end:
            self.since = time.monotonic()
        return text[:end]

    def unfinished(self) -> bytes:
        """The rest, which waits no longer."""
        rest, self.rest = self.rest, b""
        return rest


@dataclass
class Printer:
    """Writes lines of many sources to stdout and stderr.

    prefixes: how lines begin. Style NONE without timestamps passes the ranks' bytes unchanged. folder: output is also
    written to FOLDER/rank.07/stdout and stderr, unchanged; or None. without_hvdlite: a rank has reported that its
    Python cannot import hvdlite.
    """

    prefixes: Prefixes = field(default_factory=Prefixes)
    folder: str | None = None
    without_hvdlite: bool = False
    _files: dict[Key, int] = field(default_factory=dict)
    _places: dict[int, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        out = self._place(1)
        self._places = {1: out, 2: out if _same_file(1, 2) else self._place(2)}

    def feed(self, source: Source, data: bytes) -> None:
        """Print the lines that these bytes of a source complete."""
        self.without_hvdlite = self.without_hvdlite or b"No module named 'hvdlite'" in data
        if source.rank and self.prefixes.alone:
            self.prefixes.join()
        if self._files:
            write_all(self._files[source.key], data)
        if text := source.completed(data):
            self._places[source.destination].write(source.key, text, bool(source.rest))
        if len(source.rest) > _LONGEST:
            self.flush(source)

    def flush(self, source: Source, older_than: float = 0.0) -> None:
        """Print the unfinished line of a source if it has waited for `older_than` seconds."""
        place = self._places[source.destination]
        if source.rest and time.monotonic() - source.since >= older_than:
            place.write(source.key, source.unfinished(), more=False)
        place.catch_up(source.key, last=older_than == 0.0)

    def tell(self, text: str) -> None:
        """Print lines of hvdliterun's own to stderr."""
        self._places[2].tell(2, text.encode())

    def end_lines(self) -> None:
        """End unfinished lines, so that other text begins on a line of its own."""
        for place in self._places.values():
            place.end()

    def __enter__(self) -> Printer:
        """Make the ranks' files in `folder`; files of an earlier job become empty. Raises OSError."""
        ranks = self.prefixes.ranks
        width = len(str(ranks - 1))
        for rank in range(ranks) if self.folder is not None else ():
            folder = os.path.join(self.folder or "", f"rank.{rank:0{width}d}")
            os.makedirs(folder, exist_ok=True)
            for destination, name in ((1, "stdout"), (2, "stderr")):
                self._files[rank, destination] = _made_anew(folder, name)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            os.close(file)

    def _place(self, destination: int) -> Place:
        if self.prefixes.style is Style.NONE and not self.prefixes.timestamps:
            return Raw()
        label = self.prefixes.of
        return Screen(label) if can_redraw(destination, os.environ) else Lines(label)


def _made_anew(folder: str, name: str) -> int:
    """A descriptor of an empty file. If other users may write into the folder, links are not followed: a link may name
    another file of this user. Raises OSError."""
    if os.lstat(folder).st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "belongs to another user", folder)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = os.fstat(directory)
        shared = found.st_uid != os.geteuid() or found.st_mode & 0o022
        how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | (os.O_NOFOLLOW if shared else 0)
        return os.open(name, how, 0o666, dir_fd=directory)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.path.join(folder, name)) from error
    finally:
        os.close(directory)


def _same_file(one: int, other: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False
