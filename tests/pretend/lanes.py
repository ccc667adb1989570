"""Lanes whose ranks are threads, with arrays of the pretend CuPy, and messages that ignore streams."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import Place, allreduce, pipeline
from hvdlite.algorithms.reduction import Reduction
from hvdlite.gpu_streams import NOTHING_PENDING
from hvdlite.lanes import gpu_side
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.transports import device
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.pretend import cupy


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(device, "CHUNK", 256)  # several pieces per message
    for name in ("WHOLE", "CHUNK", "GPU_CHUNK"):
        monkeypatch.setattr(pipeline, name, 384)  # several messages per step
    cupy.LOG.clear()
    yield


class Impatient(ThreadTransport):
    """A transport that ignores streams, as MPI does: it reads and writes memory at once."""

    def send(self, array: Any, dest: int) -> None:
        cupy.LOG.append(("message", array.nbytes, type(array).__module__, self.rank))
        super().send(cupy.bits_of(array), dest)

    def receive(self, array: Any, source: int) -> None:
        super().receive(cupy.bits_of(array), source)

    def start_exchange(self, send: Any, dest: int, receive: Any, source: int, after: Any = NOTHING_PENDING) -> Any:
        """Overwrite `receive` at once, because a message may begin to arrive at once."""
        cupy.bits_of(receive).view(np.uint8)[...] = 0xEE
        return super().start_exchange(send, dest, cupy.bits_of(receive), source, after)

    def split(self, color: int | None) -> Any:
        part = super().split(color)
        return part and Impatient(part.board, part.rank)


def on_lanes(size: int, way: str, aware: bool, function: Callable[[Lane], Any], hosts: Any = ()) -> list[Any]:
    """Run function(lane) on `size` ranks at once, each with its own stream. Returns the results in rank order."""

    def rank_main(transport: ThreadTransport) -> Any:
        place = Place(size, way in ("shared", "hierarchical"), forced_on_gpu=way, cuda_aware=aware, hosts=hosts)
        lane = Lane(Impatient(transport.board, transport.rank), place)
        with cupy.Stream():
            result = function(lane)
        lane.leave()
        return result

    return run_ranks(size, rank_main)


def produced(lane: Lane, length: int, dtype: Any = np.float32) -> Any:
    """An array that holds i % 7 + rank once its stream has run."""
    array = cupy.empty(length, dtype)
    array[...] = np.arange(length) % 7 + lane.transport.rank
    return array


def stream_of(lane: Lane) -> int:
    """The stream of the lane's side on the GPU."""
    side = lane.host.gpu
    assert isinstance(side, gpu_side.Side)
    return int(side.stream.ptr)


def summed(lane: Lane, array: Any, name: str = "x", wait: bool = True) -> Any:
    def work(lane: Workplace) -> Any:
        allreduce(lane.transport, lane.workspace, lane.place, array, Reduction())
        return array

    request = Request(Signature("allreduce", name), work)
    gpu_side.on_gpu(lane, request, array)
    return lane.run(request) if wait else lane.submit(request)


def expected(size: int, length: int) -> Any:
    return np.arange(length) % 7 * size + size * (size - 1) // 2


def in_use() -> int:
    """Run all streams to their ends, and return the number of living allocations."""
    for stream in list(cupy.Stream.known.values()):
        stream.run_to(stream.issued)
    gc.collect()
    return cupy.Allocation.made - cupy.Allocation.gone
