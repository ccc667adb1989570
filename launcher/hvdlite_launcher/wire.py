"""The protocol between hvdliterun and its agents, over a pair of pipes or an ssh connection.

A frame consists of a kind, a rank, a length, and data of that length. Output of ranks (STDOUT, STDERR) and files of the
job's folder are sent unchanged (TASK: the function of hvdlite.run; RESULT: what a rank has returned). A MESSAGE is a
JSON object. From hvdliterun:

    job              what the agent must know of the job; the first message
    told             the rank that failed first
    signal           the signal that the agent sends to all ranks
    pause            hvdliterun is being suspended
    beat             a sign of life
    end              the job has ended

From agents:

    facts, name      the host is ready
    problem          why the host cannot take part
    started, ended   the rank that has started or ended
    failed, inside   the host's first failure, and whether it was in hvd.init()
    absent, waiting  see `job_folder.arrivals`
    swallowed, rank  see `job_folder.FILES`
    summary, rank    see `job_folder.FILES`
    gone             nothing of the job is left

The agent's first bytes are a MARK. Text before it is skipped, such as a greeting of a login shell.
"""

import json
import os
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

MARK = b"\0hvdlite-agent\n"
MESSAGE, STDOUT, STDERR, RESULT, TASK = range(5)  # kinds of frames
_HEADER = struct.Struct("!BIQ")
_LONGEST = 1 << 24  # bytes of a frame, except RESULT and TASK


def encode(kind: int, rank: int, data: bytes) -> bytes:
    """One frame."""
    return _HEADER.pack(kind, rank, len(data)) + data


def message(**values: object) -> bytes:
    """One frame of kind MESSAGE."""
    return encode(MESSAGE, 0, json.dumps(values).encode())


def decode(data: bytes) -> dict[str, Any]:
    """The message in a frame of kind MESSAGE."""
    values: dict[str, Any] = json.loads(data)
    return values


class Decoder:
    """Makes frames of bytes that come in pieces of any length. marked: whether frames begin only after a MARK."""

    def __init__(self, marked: bool = False) -> None:
        self._marked = marked
        self._rest = bytearray()  # `bytes` would be copied for each piece

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The frames (kind, rank, data) that these bytes complete. Raises ValueError if a header makes no sense."""
        self._rest += data
        if self._marked:
            _, mark, rest = self._rest.partition(MARK)
            if not mark:
                return
            self._marked, self._rest = False, rest
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


class Link:
    """One end of the connection between hvdliterun and an agent.

    closed: whether the other end has closed it.
    """

    def __init__(self, out: int, marked: bool = False) -> None:
        self.closed = False
        self._out = out
        self._heard = time.monotonic()
        self._decoder = Decoder(marked)
        self._unsent = bytearray()
        self._lock = threading.Lock()

    @property
    def silence(self) -> float:
        """For how many seconds the other end has given no sign of life."""
        return time.monotonic() - self._heard

    @property
    def unsent(self) -> int:
        """How many bytes are waiting to be sent."""
        return len(self._unsent)

    def forgive(self) -> None:
        """Measure the silence of the other end from now on."""
        self._heard = time.monotonic()

    def take(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """The frames that these bytes complete. No bytes: the other end has closed the connection. Raises
        ValueError."""
        self.closed |= not data
        self.forgive()
        return self._decoder.feed(data)

    def send(self, data: bytes = b"") -> int:
        """Send the rest of earlier frames and then these bytes, as far as that is possible without waiting.

        Returns how many bytes are left. If the other end is gone, all bytes are dropped.
        """
        with self._lock:
            self._unsent += data
            try:
                if self._unsent:
                    del self._unsent[: os.write(self._out, self._unsent)]
            except BlockingIOError:
                pass
            except OSError:
                self._unsent.clear()
            return len(self._unsent)

    def close(self) -> None:
        """Send nothing from now on: the descriptor may soon belong to another file."""
        with self._lock:
            self._out = -1

    def say(self, **values: object) -> None:
        """Send a message."""
        self.send(message(**values))
