"""Carries the ranks' output to the terminal, each line under its rank: `[2]<stdout>:text`, as Horovod does.

One process writes everything, so lines of different ranks never mix. A line not yet ended (a progress
bar, a prompt) shows after a short wait; `\\r` ends a line as `\\n` does, so that a bar stays in its place.
"""

from __future__ import annotations

import errno
import os
import re
import select
import time
from dataclasses import dataclass, field

_SEGMENT = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?=.)|\r?\Z)", re.DOTALL)  # a last \r may still become \r\n
PARTIAL_WAIT = 0.1  # seconds that an unfinished line is held back
_LONGEST = 1 << 20  # bytes of one that are held back; what is longer may be cut by other ranks' lines


@dataclass
class Source:
    """One stream of one rank. rest: what has come since the last line's end, the first of it at `since`."""

    rank: int
    destination: int
    rest: bytes = b""
    since: float = 0.0

    @property
    def label(self) -> bytes:
        """What stands before its lines."""
        return f"[{self.rank}]<{'stdout' if self.destination == 1 else 'stderr'}>:".encode()


@dataclass
class Printer:
    """Writes whole lines of many sources to stdout and stderr.

    prefix: whether lines carry their label; without it each rank's bytes stay as they are. timestamps: whether the
    time stands before it. folder: where each rank's output is written too, as it is (FOLDER/rank.07/stdout), or None.
    ranks: how many there are. without_hvdlite: whether any has said that its Python cannot import it.
    _open: per destination, the source whose line was left unfinished there, so that nobody else's text is glued to it.
    """

    prefix: bool
    timestamps: bool = False
    folder: str | None = None
    ranks: int = 1
    without_hvdlite: bool = False
    _files: dict[tuple[int, int], int] = field(default_factory=dict)
    _open: dict[int, Source | None] = field(default_factory=dict)
    _alias: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        same = _same_file(1, 2)
        self._alias = {1: 1, 2: 1 if same else 2}

    def feed(self, source: Source, data: bytes) -> None:
        """Take what a source has written, and print all lines that it completes."""
        self.without_hvdlite = self.without_hvdlite or b"No module named 'hvdlite'" in data
        if (source.rank, source.destination) in self._files:
            write_all(self._files[source.rank, source.destination], data)
        source.since = source.since if source.rest else time.monotonic()
        text = source.rest + data
        ends = b"\n" in data or b"\r" in data or source.rest.endswith(b"\r")  # else it is not searched once more
        segments = [segment for segment in _SEGMENT.findall(text) if segment] if ends else [text]
        source.rest = b"" if segments[-1].endswith(b"\n") else segments.pop()
        if segments:
            source.since = time.monotonic()
            self._print(source, segments)
        if len(source.rest) > _LONGEST:
            self.flush(source)

    def flush(self, source: Source, older_than: float = 0.0) -> None:
        """Print the unfinished line of a source, if it has waited for that many seconds."""
        if source.rest and time.monotonic() - source.since >= older_than:
            rest, source.rest = source.rest, b""
            self._print(source, [rest])

    def end_lines(self) -> None:
        """End the lines left unfinished, so that what follows starts on its own."""
        for destination, source in self._open.items():
            if source is not None:
                write_all(destination, b"\n")
        self._open.clear()

    def __enter__(self) -> Printer:
        """Make the ranks' own files, empty where an earlier job has left some. Raises OSError."""
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

    def _label(self, source: Source) -> bytes:
        return time.asctime().encode() + source.label if self.timestamps else source.label

    def _print(self, source: Source, segments: list[bytes]) -> None:
        if not self.prefix:
            write_all(source.destination, b"".join(segments))
            return
        place = self._alias[source.destination]
        unfinished = self._open.get(place)
        parts = [b"\n"] if unfinished is not None and unfinished is not source else []
        fresh = unfinished is not source
        for segment in segments:
            parts.append(self._label(source) + segment if fresh and segment != b"\r" else segment)
            fresh = segment.endswith((b"\n", b"\r"))
        self._open[place] = None if fresh else source
        write_all(source.destination, b"".join(parts))


def _made_anew(folder: str, name: str) -> int:
    """A descriptor of an empty file. Where others may write into the folder, links are not followed: they may lead to
    another file of ours. Raises OSError."""
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
    """Write everything, waiting where the destination takes no more. Raises BrokenPipeError."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(destination, view) :]
        except BlockingIOError:
            select.select([], [destination], [])


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:
        return False
