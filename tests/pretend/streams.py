"""Streams and events of the pretend CuPy. Work queues up until something waits for it."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.pretend.memory import DRIVER

LOG: list[tuple[Any, ...]] = []
"""All calls, in order."""
LOCK = threading.RLock()
HERE = threading.local()
NUMBERS = itertools.count(1)


class Stream:
    """A queue of work, which runs when something waits for it."""

    known: dict[int, Stream] = {}  # noqa: RUF012
    null: Stream
    """The default stream."""

    def __init__(self, non_blocking: bool = False) -> None:
        self.ptr = next(NUMBERS) if Stream.known else 0
        self.waiting: deque[Callable[[], Any]] = deque()
        self.issued = self.reached = 0
        Stream.known[self.ptr] = self

    def run_to(self, point: int) -> None:
        with LOCK:
            while self.reached < point:
                self.reached += 1
                self.waiting.popleft()()

    def synchronize(self) -> None:
        LOG.append(("synchronize", self.ptr))
        self.run_to(self.issued)

    def __enter__(self) -> Stream:
        stack().append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        stack().pop()


Stream.null = Stream()


def stack() -> list[Stream]:
    if not hasattr(HERE, "streams"):
        HERE.streams = [Stream()]
    return HERE.streams


def get_current_stream() -> Stream:
    return stack()[-1]


def issue(work: Callable[[], Any], stream: Stream | None = None) -> None:
    stream = stream or get_current_stream()
    with LOCK:
        stream.waiting.append(work)
        stream.issued += 1


class Event:
    known: dict[int, Event] = {}  # noqa: RUF012

    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.ptr = next(NUMBERS)
        self.stream: Stream | None = None
        self.point = 0
        Event.known[self.ptr] = self

    @property
    def done(self) -> bool:
        return self.stream is None or self.stream.reached >= self.point

    def run(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.point)

    def synchronize(self) -> None:
        LOG.append(("wait for event", self.ptr))
        self.run()


class Device:
    def __init__(self, number: int = 0) -> None:
        assert number == 0
        if DRIVER is not None:
            DRIVER.pretend_use()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def use(self) -> None:
        LOG.append(("use", threading.current_thread().name))


def eventRecord(event: int, stream: int) -> None:
    LOG.append(("record", event, stream))
    Event.known[event].stream, Event.known[event].point = Stream.known[stream], Stream.known[stream].issued


def streamWaitEvent(stream: int, event: int) -> None:
    LOG.append(("stream waits", stream, event))
    awaited = Event.known[event]
    origin, point = awaited.stream, awaited.point
    issue(lambda: origin and origin.run_to(point), Stream.known[stream])
