"""Order between the work of GPU streams and of threads.

On a GPU a call returns before its work is done. A *mark* is a point in the work of streams: CUDA events on a GPU,
nothing on the host. All code that waits for a GPU is in this module. It waits for events and streams, never for the
whole device.

A tensor does not record the stream that computes it, and torch and CuPy each have a current stream. So a mark follows
all current streams (`FOLLOWED`), which usually are the same one. A superfluous wait costs time, and never changes a
result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeVar, TypeVarTuple

import numpy as np

from hvdlite.arrays import Array, device_of, is_host, module
from hvdlite.errors import HvdliteError

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
FOLLOWED: list[Callable[[int], int]] = []
"""One function for each framework. It takes a GPU's number and returns the address of the CUDA stream on which the
framework now issues the calling thread's work.
"""


def callers_streams(xp: ModuleType, device: int) -> list[int]:
    """The CUDA streams on which the calling thread now issues work: CuPy's and each framework's, each once."""
    streams = [int(xp.cuda.get_current_stream().ptr), *(stream_of(device) for stream_of in FOLLOWED)]
    return list(dict.fromkeys(streams))


RELIEF: list[Callable[[], None]] = []
"""Functions that free the GPU memory that a framework keeps for later use."""


class Event(Protocol):
    """The attributes of a CUDA event that hvdlite uses."""

    @property
    def ptr(self) -> int: ...
    @property
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...


class Mark:
    """A point in the work of GPU streams. A mark on the host has no events, and waiting for it returns at once."""

    def __init__(
        self, xp: ModuleType = np, device: int = 0, streams: Sequence[int] = (), events: Sequence[Event] = ()
    ) -> None:
        self.xp, self.device, self.streams, self.events = xp, device, streams, events

    def wait(self) -> None:
        """Block the calling thread until the work before the mark is done."""
        for event in self.events:
            event.synchronize()

    def adopt(self) -> None:
        """Make the mark's GPU the calling thread's, permanently.

        A thread that has chosen no GPU gets the host's first one, where its context takes half a gigabyte.
        """
        if self.events:
            self.xp.cuda.Device(self.device).use()

    def precede(self) -> None:
        """Make the calling thread's later GPU work run after the work before the mark. Returns at once."""
        if self.events:
            with self.xp.cuda.Device(self.device):
                for stream in callers_streams(self.xp, self.device):
                    for event in self.events:
                        self.xp.cuda.runtime.streamWaitEvent(stream, event.ptr)

    @property
    def passed(self) -> bool:
        """Whether `wait` would return at once."""
        return all(event.done for event in self.events)


NOTHING_PENDING = Mark()


def mark(array: Array) -> Mark:
    """A mark after all work that the calling thread has issued on the array's GPU.

    Raises HvdliteError while a CUDA graph is captured: other ranks would not take part when the graph is replayed.
    """
    if is_host(array):
        return NOTHING_PENDING
    xp, device = module(array), device_of(array)
    with xp.cuda.Device(device):
        streams = callers_streams(xp, device)
        if any(xp.cuda.runtime.streamIsCapturing(stream) for stream in streams):
            raise HvdliteError(
                "a collective was called while a CUDA graph is being captured: a graph replays GPU work of one rank, "
                "and other ranks would not take part. Communicate outside torch.cuda.graph and make_graphed_callables"
            )
        return Mark(xp, device, streams, [recorded(xp, stream, sleep=True) for stream in streams])


def issued(array: Array) -> Mark:
    """A mark after the work issued on CuPy's current stream alone. In a lane's work that is the lane's stream."""
    if is_host(array):
        return NOTHING_PENDING
    xp = module(array)
    stream = int(xp.cuda.get_current_stream().ptr)
    return Mark(xp, device_of(array), [stream], [recorded(xp, stream)])


def recorded(xp: ModuleType, stream: int, sleep: bool = False) -> Event:
    """An event after the work issued on a stream of the current GPU. sleep: a waiting thread sleeps, not spins."""
    event: Event = xp.cuda.Event(block=sleep, disable_timing=True)
    xp.cuda.runtime.eventRecord(event.ptr, stream)
    return event


def on_host(array: Array) -> Array:
    """The array, if it lies on the host; else a host copy, made after the work that the calling thread has issued."""
    if is_host(array):
        return array
    mark(array).wait()
    on_gpu: Any = array
    copy: Array = on_gpu.get()
    return copy


GPUS_IN_MESSAGES: list[tuple[ModuleType, int]] = []
"""The array module and number of the GPU whose memory MPI is given pointers to; empty if there is none."""

WITHOUT_GPU: set[int] = set()
"""Threads that entered `in_mpi` before GPUS_IN_MESSAGES had an entry."""

PAUSE = 0.005  # seconds; longer than a test for other ranks' messages, which calls MPI outside `in_mpi`


def send_from(xp: ModuleType, device: int) -> None:
    """Announce that MPI gets pointers to this GPU's memory from now on. Waits for threads that entered MPI before."""
    first = not GPUS_IN_MESSAGES
    if first:
        GPUS_IN_MESSAGES.append((xp, device))
    WITHOUT_GPU.discard(threading.get_ident())  # else two threads in this function would wait for each other
    while WITHOUT_GPU:
        time.sleep(0.001)
    time.sleep(PAUSE if first else 0.0)


def in_mpi(function: Callable[[*Ts], R], *arguments: *Ts) -> R:
    """Call a function that may spend long in MPI, and return its result."""
    me = threading.get_ident()
    WITHOUT_GPU.add(me)  # before reading GPUS_IN_MESSAGES: so either this thread or `send_from` sees the other
    try:
        if GPUS_IN_MESSAGES:
            adopt_gpu()
            WITHOUT_GPU.discard(me)
        return function(*arguments)
    finally:
        WITHOUT_GPU.discard(me)


def adopt_gpu() -> None:
    """Give the calling thread a CUDA context, if messages use a GPU. Each thread calls this before it calls MPI.

    A thread inside MPI may copy GPU memory for another thread's message. Without a context the copy fails, and Open MPI
    aborts the job.
    """
    for xp, device in GPUS_IN_MESSAGES:
        if not xp.cuda.driver.ctxGetCurrent():
            xp.cuda.Device(device).use()


def finish(array: Array) -> None:
    """Wait for the calling thread's current stream, because MPI ignores streams. Then MPI may use the array."""
    if not is_host(array):
        module(array).cuda.get_current_stream().synchronize()
