"""What hvdliterun and its agents on other hosts say to each other over an ssh connection's pipes.

Frames of a kind, a rank, a length and that many bytes. A rank's output is carried as it is, and so are files of the
job's folder (what a rank has returned, by rank; what all are to run); everything else is a small message in JSON. A
shell that greets on its stdout (a `.bashrc` with an `echo`) is skipped: the agent's first bytes are a mark.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

MARK = b"\0hvdlite-agent\n"
MESSAGE, STDOUT, STDERR, RESULT, TASK = range(5)  # kinds of frames
_HEADER = struct.Struct("!BIQ")
_LONGEST = 1 << 24  # bytes of a frame, but of those that carry what the user has pickled


def encode(kind: int, rank: int, data: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(kind, rank, len(data)) + data


def message(**values: Any) -> bytes:
    """One frame that carries a message."""
    return encode(MESSAGE, 0, json.dumps(values).encode())


def decode(data: bytes) -> dict[str, Any]:
    """The message in a frame of kind MESSAGE."""
    values: dict[str, Any] = json.loads(data)
    return values


@dataclass
class Decoder:
    """Takes bytes as they come, and gives whole frames. marked: whether they begin only after a MARK."""

    marked: bool = False
    _rest: bytearray = field(default_factory=bytearray, repr=False)  # bytes would be copied at every piece of a frame

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The frames (kind, rank, data) that these bytes complete. Raises ValueError for what is no frame."""
        self._rest += data
        if self.marked:
            _, mark, rest = self._rest.partition(MARK)
            if not mark:
                return
            self.marked, self._rest = False, rest
        while len(self._rest) >= _HEADER.size:
            kind, rank, length = _HEADER.unpack_from(self._rest)
            if kind > TASK or (kind < RESULT and length > _LONGEST):
                raise ValueError(f"no frame: kind {kind}, {length} bytes")
            end = _HEADER.size + length
            if len(self._rest) < end:
                return
            frame = bytes(self._rest[_HEADER.size : end])
            del self._rest[:end]
            yield kind, rank, frame
