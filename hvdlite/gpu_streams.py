"""Order between the work of GPU streams and of threads.

A *mark* is a point in the work of streams: on a GPU, where a call returns before its work is done, an event; on the
host nothing. All waiting for a GPU is here, and is for events and streams, never for the whole device.

A tensor does not say on which stream it was computed, and torch and CuPy each have a current one. A mark follows all of
them (`FOLLOWED`). Usually they are one; to wait for one too many costs time, never a sum.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from hvdlite.arrays import Array, device_of, is_host, module
from hvdlite.errors import HvdliteError

FOLLOWED: list[Callable[[int], int]] = []
"""What gives frameworks' streams: from the GPU's number the CUDA stream on which the framework now issues the calling
thread's work, as an address."""


def callers_streams(xp: ModuleType, device: int) -> list[int]:
    """The CUDA streams on which the calling thread now issues work: CuPy's and each framework's, usually one."""
    streams = [int(xp.cuda.get_current_stream().ptr), *(stream_of(device) for stream_of in FOLLOWED)]
    return list(dict.fromkeys(streams))

RELIEF: list[Callable[[], None]] = []
"""What gives back GPU memory that a framework keeps for later."""


class Mark:
    """A point in the work of GPU streams. On the host there is nothing to wait for: no events."""

    def __init__(
        self, xp: Any = None, device: int = 0, streams: Sequence[int] = (), events: Sequence[Any] = ()
    ) -> None:
        self.xp, self.device, self.streams, self.events = xp, device, streams, events

    def wait(self) -> None:
        """Block the calling thread until the work before the mark is done."""
        for event in self.events:
            event.synchronize()

    def adopt(self) -> None:
        """Make its GPU the calling thread's, for good: CUDA gives a thread that has chosen none the first GPU of the
        host, and a context there, which takes half a gigabyte."""
        if self.events:
            self.xp.cuda.Device(self.device).use()

    def precede(self) -> None:
        """What the calling thread issues from now on runs after the work before the mark; the thread goes on."""
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
    """A mark behind all that the calling thread has issued so far on the array's GPU.

    Raises HvdliteError while a CUDA graph is captured: what it replays, no other rank would know of.
    """
    if is_host(array):
        return NOTHING_PENDING
    xp, device = module(array), device_of(array)
    with xp.cuda.Device(device):
        streams = callers_streams(xp, device)
        if any(xp.cuda.runtime.streamIsCapturing(stream) for stream in streams):
            raise HvdliteError(
                "a collective was called while a CUDA graph is being captured: a graph replays GPU work alone, and the "
                "other ranks would not take part. Communicate outside torch.cuda.graph and make_graphed_callables"
            )
        return Mark(xp, device, streams, [recorded(xp, stream, sleep=True) for stream in streams])


def issued(array: Array) -> Mark:
    """A mark behind what the calling thread has issued on CuPy's current stream alone: in a lane's work, the lane's."""
    if is_host(array):
        return NOTHING_PENDING
    xp = module(array)
    stream = int(xp.cuda.get_current_stream().ptr)
    return Mark(xp, device_of(array), [stream], [recorded(xp, stream)])


def recorded(xp: ModuleType, stream: int, sleep: bool = False) -> Any:
    """An event behind the work issued so far on a stream of the current GPU. sleep: a thread that waits for it leaves
    its core to others."""
    event = xp.cuda.Event(block=sleep, disable_timing=True)
    xp.cuda.runtime.eventRecord(event.ptr, stream)
    return event


def on_host(array: Array) -> Array:
    """The array, or a host copy of one on a GPU, behind all that the calling thread has issued there."""
    if is_host(array):
        return array
    mark(array).wait()
    on_gpu: Any = array
    copy: Array = on_gpu.get()
    return copy


GPUS_IN_MESSAGES: list[tuple[ModuleType, int]] = []

WITHOUT_GPU: set[int] = set()
"""Threads inside of `in_mpi` that went in before any GPU was in messages."""

PAUSE = 0.005  # seconds; longer than a look at other ranks, which calls MPI outside of `in_mpi`


def send_from(xp: ModuleType, device: int) -> None:
    """MPI is given pointers to this GPU's memory from now on. Waits for threads that went into MPI before they knew."""
    first = not GPUS_IN_MESSAGES
    if first:
        GPUS_IN_MESSAGES.append((xp, device))
    WITHOUT_GPU.discard(threading.get_ident())  # else two threads in here would wait for each other
    while WITHOUT_GPU:
        time.sleep(0.001)
    time.sleep(PAUSE if first else 0.0)


def in_mpi(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result; it may spend long in MPI."""
    me = threading.get_ident()
    WITHOUT_GPU.add(me)  # before it looks whether there is one: of this and `send_from` one sees the other
    try:
        if GPUS_IN_MESSAGES:
            adopt_gpu()
            WITHOUT_GPU.discard(me)
        return function(*arguments)
    finally:
        WITHOUT_GPU.discard(me)


def adopt_gpu() -> None:
    """Called by each thread that is about to call MPI: whichever thread does may find itself copying GPU memory for a
    message of another, which fails where the thread has no CUDA context (Open MPI then aborts the job)."""
    for xp, device in GPUS_IN_MESSAGES:
        if not xp.cuda.driver.ctxGetCurrent():
            xp.cuda.Device(device).use()


def finish(array: Array) -> None:
    """Wait for the calling thread's current stream: MPI, which ignores streams, may touch the array then."""
    if not is_host(array):
        module(array).cuda.get_current_stream().synchronize()
