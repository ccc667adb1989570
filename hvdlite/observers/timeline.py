"""The timeline: what happens to each tensor when, as rank 0 sees it, for chrome://tracing or Perfetto.

Horovod's format: one JSON array of trace events in which each tensor is a "process". While this rank waits for the
others, the tensor NEGOTIATEs; then it does its work:

    NEGOTIATE_ALLREDUCE [0 ............ 1 2]  ALLREDUCE [............]      (the numbers mark ranks)

There is no coordinator that hears each rank's call, so the marks of other ranks carry the time at which rank 0 learned
that all had called. Lanes note events in a list, which a thread writes a few times per second: 10 us per request in
all, measured, and nothing where no timeline is. Each batch overwrites the closing bracket and brings its own, in one
call to the system: whatever ends the process, the file is complete JSON up to the last batch.
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
from typing import Any, NamedTuple

from hvdlite.lanes.matching import ranks
from hvdlite.lanes.observer import Observer, Seat
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature

FLUSH_SECONDS = 0.05
END = b"\n]\n"
KINDS = {"gradients": "ALLREDUCE"}
"""Horovod's word, where it is not ours in capitals."""


class Event(NamedTuple):
    """One event of a tensor ("": of the whole job). phase: 'B'egin, 'E'nd, 'X' a mark, 'i' a mark across all."""

    tensor: str
    phase: str
    seconds: float
    name: str = ""
    args: dict[str, str] | None = None


class Timeline:
    """An observer that writes a trace to `path`, from now until `stop`. mark_cycles: mark where a lane turns to its
    next request. size: of the job; what concerns fewer ranks has them in its name. Raises OSError where the file cannot
    be written."""

    def __init__(self, path: str, mark_cycles: bool = False, size: int = 0) -> None:
        self.path, self.mark_cycles, self.size = path, mark_cycles, size
        self.events: deque[Event] = deque()
        self.began = time.monotonic()
        self.processes: dict[str, int] = {}
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        self.end = 0
        self.write(metadata(0, start_time_since_epoch_in_micros=time.time_ns() // 1000))
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.main, name="hvdlite-timeline", daemon=True)
        self.thread.start()

    # What lanes tell

    def queued(self, seat: Seat, request: Request[Any]) -> None:
        tensor, now = self.tensor_name(seat, request), time.monotonic()
        self.events.append(Event(tensor, "B", now, f"NEGOTIATE_{kind(request.signature)}"))
        self.events.append(Event(tensor, "X", now, str(seat.rank)))

    def agreed(self, seat: Seat, request: Request[Any]) -> None:
        tensor, now, me = self.tensor_name(seat, request), time.monotonic(), seat.rank
        marks = [Event(tensor, "X", now, str(rank)) for rank in range(len(seat.members)) if rank != me]
        cycle = [Event("", "i", now, "CYCLE_START")] if self.mark_cycles else []
        self.events.extend([*cycle, *marks, Event(tensor, "E", now), Event(tensor, "B", now, kind(request.signature))])

    def done(self, seat: Seat, request: Request[Any]) -> None:
        args = facts(request.signature) if request.agreed and not request.handle.error else None
        self.events.append(Event(self.tensor_name(seat, request), "E", time.monotonic(), args=args))

    def tensor_name(self, seat: Seat, request: Request[Any]) -> str:
        name = f"{request.signature.kind}.{request.signature.name}"
        return name if len(seat.members) >= self.size else f"{name} ({ranks(seat.members)})"

    # The file

    def main(self) -> None:
        while not self.stopping.wait(FLUSH_SECONDS):
            self.flush()

    def stop(self) -> None:
        """Write what is left, and close the file."""
        self.stopping.set()
        self.thread.join()
        self.flush()
        os.close(self.file)

    def flush(self) -> None:
        """Write what has been noted. Where that fails (a full disk), the timeline ends, and the log says so."""
        batch = [self.events.popleft() for _ in range(len(self.events))]
        try:
            self.write(line for event in batch for line in self.lines(event))
        except OSError as error:
            self.events = deque(maxlen=0)
            logging.getLogger("hvdlite").error("the timeline in %s ends: %s", self.path, error)
            with contextlib.suppress(OSError):
                os.ftruncate(self.file, self.end)
                os.pwrite(self.file, END, self.end)

    def lines(self, event: Event) -> Iterable[dict[str, Any]]:
        """The event as Chrome reads it, after what introduces its tensor, the first time."""
        if event.tensor and event.tensor not in self.processes:
            self.processes[event.tensor] = len(self.processes) + 1
            yield from metadata(self.processes[event.tensor], name=event.tensor)
        line: dict[str, Any] = {"ph": event.phase}
        if event.name:
            line["name"] = event.name
        line |= {"ts": round((event.seconds - self.began) * 1e6), "pid": self.processes.get(event.tensor, 0)}
        if event.phase == "X":
            line["dur"] = 0
        if event.phase == "i":
            line["s"] = "g"
        yield line | ({"args": event.args} if event.args else {})

    def write(self, lines: Iterable[dict[str, Any]]) -> None:
        """Append to the array."""
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
    """Have one timeline among the observers, to this file; None: have none. Says in the log what cannot be written.
    size: of the job."""
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


def metadata(process: int, **args: Any) -> list[dict[str, Any]]:
    """What introduces a "process"."""
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": args},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
    ]


def kind(signature: Signature) -> str:
    """Horovod's word for it: ALLREDUCE, ADASUM, ALLGATHER, ..."""
    if ("operation", "Adasum") in signature.facts:
        return "ADASUM"
    word = signature.kind.removeprefix("grouped_")
    return KINDS.get(word, word.replace(" ", "_").upper())


def facts(signature: Signature) -> dict[str, str]:
    """dtype and shape, where the signature has them."""
    known: dict[str, Any] = dict(signature.facts)
    found = {"dtype": known["dtype"]} if "dtype" in known else {}
    return found | ({"shape": str(list(known["shape"]))} if "shape" in known else {})
