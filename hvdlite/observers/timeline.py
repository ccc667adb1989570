"""The timeline: a trace file with the times of each tensor's operations on rank 0, for chrome://tracing or Perfetto.

The format is Horovod's: one JSON array of trace events, in which each tensor is a "process". While rank 0 waits for the
other ranks, the event is NEGOTIATE_...; then comes the operation itself:

    NEGOTIATE_ALLREDUCE [0 ............ 1 2]  ALLREDUCE [............]      (the numbers mark ranks)

Within the operation of a compressed bucket are COMPRESS, SEND and DECOMPRESS, if rank 0 sends a part of the bucket.
Rank 0 does not learn when each rank called, so the marks of other ranks have the time at which all had called. Lanes
add events to a list, which a thread writes a few times per second. That costs 10 us per request. Each batch overwrites
the closing bracket and writes a new one in one system call. So the file is complete JSON whenever the process ends.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

from hvdlite.lanes.matching import ranks
from hvdlite.lanes.observer import Observer, Seat
from hvdlite.lanes.request import Request, T
from hvdlite.lanes.signature import Signature

FLUSH_SECONDS = 0.05
END = b"\n]\n"
KINDS = {"gradients": "ALLREDUCE"}
"""Horovod's word for a kind of request, if it is not the kind in capitals."""


class Event(NamedTuple):
    """An event of the trace.

    Attributes:
        tensor: The tensor's name; "" for the whole job.
        phase: "B" begins, "E" ends, "X" is a mark, "i" a mark across all tensors.
        seconds: When, by `time.monotonic`.
        name: The name of the event.
        args: Facts to show.
    """

    tensor: str
    phase: str
    seconds: float
    name: str = ""
    args: dict[str, str] | None = None


class Timeline:
    """An observer that writes a trace, from its creation until `stop`.

    Attributes:
        path: The file's path.
        mark_cycles: Whether to mark where a lane turns to its next request.
        size: The number of ranks in the job. Operations of fewer ranks have these in their names.
        events: The events that are not written yet.
        began: When the trace began.
        processes: The number of each tensor.
        file: The file descriptor.
        end: The offset of the closing bracket.
        stopping: Set when the thread is to end.
        thread: The thread that writes.
    """

    def __init__(self, path: str, mark_cycles: bool = False, size: int = 0) -> None:
        """See the attributes. Raises OSError if the file cannot be written."""
        self.path = path
        self.mark_cycles = mark_cycles
        self.size = size
        self.events: deque[Event] = deque()
        self.began = time.monotonic()
        self.processes: dict[str, int] = {}
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.end = 0
        self.write(metadata(0, start_time_since_epoch_in_micros=time.time_ns() // 1000))
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.main, name="hvdlite-timeline", daemon=True)
        self.thread.start()

    # Called by lanes: see lanes.observer

    def wait_begins(self) -> None:
        """The timeline does not show waits of the user's threads."""

    def wait_ends(self) -> None:
        """The timeline does not show waits of the user's threads."""

    def queued(self, seat: Seat, request: Request[T]) -> None:
        """This rank has called the request."""
        tensor, now = self.tensor_name(seat, request), time.monotonic()
        self.events.append(Event(tensor, "B", now, f"NEGOTIATE_{kind(request.signature)}"))
        self.events.append(Event(tensor, "X", now, str(seat.rank)))

    def agreed(self, seat: Seat, request: Request[T]) -> None:
        """All ranks have called the request."""
        tensor, now, me = self.tensor_name(seat, request), time.monotonic(), seat.rank
        marks = [Event(tensor, "X", now, str(rank)) for rank in range(len(seat.members)) if rank != me]
        cycle = [Event("", "i", now, "CYCLE_START")] if self.mark_cycles else []
        self.events.extend([*cycle, *marks, Event(tensor, "E", now), Event(tensor, "B", now, kind(request.signature))])

    def done(self, seat: Seat, request: Request[T]) -> None:
        """The request has its result, or its error."""
        well, tensor = request.agreed and not request.handle.error, self.tensor_name(seat, request)
        phases = request.phases if well else ()
        for (name, start), (_, stop) in pairwise(phases if phases and phases[0][1] >= request.agreed else ()):
            self.events += [Event(tensor, "B", start, name), Event(tensor, "E", stop)]
        self.events.append(Event(tensor, "E", time.monotonic(), args=facts(request.signature) if well else None))

    def tensor_name(self, seat: Seat, request: Request[T]) -> str:
        """The tensor's name in the trace, with the ranks if they are not all."""
        name = f"{request.signature.kind}.{request.signature.name}"
        return name if len(seat.members) >= self.size else f"{name} ({ranks(seat.members)})"

    # The file

    def main(self) -> None:
        """The thread."""
        while not self.stopping.wait(FLUSH_SECONDS):
            self.flush()

    def stop(self) -> None:
        """Write the remaining events, and close the file."""
        self.stopping.set()
        self.thread.join()
        self.flush()
        os.close(self.file)

    def flush(self) -> None:
        """Write the events so far. If that fails (a full disk, say), log an error and end the timeline."""
        batch = [self.events.popleft() for _ in range(len(self.events))]
        try:
            self.write(line for event in batch for line in self.lines(event))
        except OSError as error:
            self.events = deque(maxlen=0)
            logging.getLogger("hvdlite").error("the timeline in %s ends: %s", self.path, error)
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, self.end)
                os.pwrite(self.file, END, self.end)

    def lines(self, event: Event) -> Iterable[dict[str, object]]:
        """The event in Chrome's format. The first event of a tensor follows the tensor's name."""
        if event.tensor and event.tensor not in self.processes:
            self.processes[event.tensor] = len(self.processes) + 1
            yield from metadata(self.processes[event.tensor], name=event.tensor)
        line: dict[str, object] = {"ph": event.phase}
        if event.name:
            line["name"] = event.name
        line |= {"ts": round((event.seconds - self.began) * 1e6), "pid": self.processes.get(event.tensor, 0)}
        if event.phase == "X":
            line["dur"] = 0
        if event.phase == "i":
            line["s"] = "g"
        yield line | ({"args": event.args} if event.args else {})

    def write(self, lines: Iterable[dict[str, object]]) -> None:
        """Append lines to the array."""
        text = ",\n".join(json.dumps(line) for line in lines)
        if not text:
            return
        left, start = memoryview((",\n" if self.end else "[\n").encode() + text.encode() + END), self.end
        end = start + len(left) - len(END)
        while left:
            written = os.pwrite(self.file, left, start)
            left, start = left[written:], start + written
        self.end = end


def switch(observers: list[Observer], path: str | None, mark_cycles: bool, size: int) -> None:
    """Begin a timeline, and end the present one if it has another file. Logs an error if the file cannot be written.

    Args:
        observers: The list that gets the timeline.
        path: The file's path; None to end the present timeline.
        mark_cycles: Whether to mark where a lane turns to its next request.
        size: The number of ranks in the job.
    """
    running = next((observer for observer in observers if isinstance(observer, Timeline)), None)
    if running and running.path == path:
        return
    if running:
        observers.remove(running)
        running.stop()
    if path is not None:
        try:
            observers.append(Timeline(path, mark_cycles, size))
        except OSError as error:
            logging.getLogger("hvdlite").error("no timeline: %s", error)


def metadata(process: int, **args: object) -> list[dict[str, object]]:
    """The lines that name a "process"."""
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": args},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
    ]


def kind(signature: Signature) -> str:
    """Horovod's word for the request: ALLREDUCE, ADASUM, ALLGATHER, ..."""
    if ("operation", "Adasum") in signature.facts:
        return "ADASUM"
    word = signature.kind.removeprefix("grouped_")
    return KINDS.get(word, word.replace(" ", "_").upper())


def facts(signature: Signature) -> dict[str, str]:
    """dtype and shape, if the signature has them."""
    known: dict[str, Any] = dict(signature.facts)
    found = {"dtype": known["dtype"]} if "dtype" in known else {}
    return found | ({"shape": str(list(known["shape"]))} if "shape" in known else {})
