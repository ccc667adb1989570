"""Prints the ranks' output. Each line begins with its rank, as with Horovod: `[2]<stdout>:text`.

One process writes everything, so lines of different ranks never mix. The beginning of a line (a progress bar, a prompt)
is printed after UNFINISHED_LINE. A `\\r` ends a line as `\\n` does, so that a progress bar stays in its place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import time
from dataclasses import dataclass, field

_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=.)|\r?\Z)", re.DOTALL)  # a last \r may still become \r\n
_LONGEST = 1 << 20  # bytes of a line that are held back; other ranks' lines may cut a longer one


@dataclass
class Source:
    """One stream of one rank. rest: what came after the last end of a line. since: when the first byte of it came."""

    rank: int
    destination: int
    rest: bytes = b""
    since: float = 0.0

    @property
    def label(self) -> bytes:
        """The beginning of its lines."""
        return f"[{self.rank}]<{'stdout' if self.destination == 1 else 'stderr'}>:".encode()

    def completed(self, data: bytes) -> list[bytes]:
        """The lines, or parts of them up to a `\\r`, that these bytes complete. The rest waits for more."""
        self.since = self.since if self.rest else time.monotonic()
        text = self.rest + data
        ends = b"\n" in data or b"\r" in data or self.rest.endswith(b"\r")  # else the whole text is not searched again
        segments = [segment for segment in _SEGMENT.findall(text) if segment] if ends else [text]
        self.rest = b"" if segments[-1].endswith(b"\n") else segments.pop()
        if segments:
            self.since = time.monotonic()
        return segments

    def unfinished(self) -> bytes:
        """The rest, which waits no longer."""
        rest, self.rest = self.rest, b""
        return rest


@dataclass
class Printer:
    """Writes lines of many sources to stdout and stderr.

    prefix: whether lines begin with their label; otherwise the ranks' bytes are printed unchanged. timestamps: whether
    the time comes before the label. folder: output is also written to FOLDER/rank.07/stdout and stderr; or None. ranks:
    how many there are. without_hvdlite: a rank has reported that its Python cannot import hvdlite. _open: for each
    destination, the source whose line is unfinished there; another source must first end that line.
    """

    prefix: bool
    timestamps: bool = False
    folder: str | None = None
    ranks: int = 1
    without_hvdlite: bool = False
    _files: dict[tuple[int, int], int] = field(default_factory=dict)
    _open: dict[int, Source | None] = field(default_factory=dict)
    _alias: dict[int, int] = field(default_factory=lambda: {1: 1, 2: 1 if _same_file(1, 2) else 2})

    def feed(self, source: Source, data: bytes) -> None:
        """Print the lines that these bytes of a source complete."""
        self.without_hvdlite = self.without_hvdlite or b"No module named 'hvdlite'" in data
        if (source.rank, source.destination) in self._files:
            write_all(self._files[source.rank, source.destination], data)
        if segments := source.completed(data):
            self._print(source, segments)
        if len(source.rest) > _LONGEST:
            self.flush(source)

    def flush(self, source: Source, older_than: float = 0.0) -> None:
        """Print the unfinished line of a source if it has waited for `older_than` seconds."""
        if source.rest and time.monotonic() - source.since >= older_than:
            self._print(source, [source.unfinished()])

    def end_lines(self) -> None:
        """End unfinished lines, so that other text begins on a line of its own."""
        for destination, source in self._open.items():
            if source is not None:
                write_all(destination, b"\n")
        self._open.clear()

    def __enter__(self) -> Printer:
        """Make the ranks' files in `folder`; files of an earlier job become empty. Raises OSError."""
        width = len(str(self.ranks - 1))
        for rank in range(self.ranks) if self.folder is not None else ():
            folder = os.path.join(self.folder or "", f"rank.{rank:0{width}d}")
            os.makedirs(folder, exist_ok=True)
            for destination, name in ((1, "stdout"), (2, "stderr")):
                self._files[rank, destination] = _made_anew(folder, name)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            os.close(file)

    def _print(self, source: Source, segments: list[bytes]) -> None:
        if not self.prefix:
            write_all(source.destination, b"".join(segments))
            return
        place = self._alias[source.destination]
        unfinished = self._open.get(place)
        parts = [b"\n"] if unfinished is not None and unfinished is not source else []
        fresh = unfinished is not source
        label = time.asctime().encode() + source.label if self.timestamps else source.label
        for segment in segments:
            parts.append(label + segment if fresh and segment != b"\r" else segment)
            fresh = segment.endswith((b"\n", b"\r"))
        self._open[place] = None if fresh else source
        write_all(source.destination, b"".join(parts))


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


def write_all(destination: int, data: bytes) -> None:
    """Write all bytes, and wait while the destination takes none. Raises OSError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(destination, view) :]
        except BlockingIOError:
            select.select([], [destination], [])


def _same_file(one: int, other: int) -> bool:
    with contextlib.suppress(OSError):
        return os.path.sameopenfile(one, other)
    return False
