"""What waits for what on a GPU, proved without one: on a stand-in for CuPy whose streams do nothing until someone waits
for them, and with messages that read and write memory at once, as MPI does. Order only: no speed, no kernel.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite import arrays, gpu
from hvdlite.algorithms import Place, allreduce
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Mark
from hvdlite.buckets import Spec, plan
from hvdlite.engine import Lane
from hvdlite.errors import HvdliteError
from hvdlite.reducer import Reducer, Use
from hvdlite.requests import Request, Signature
from hvdlite.transports import device
from hvdlite.transports.threads import ThreadTransport, run_ranks
from tests.pretend import cupy

KB = 1024
WAYS = ["ring", "halving_doubling", "doubling", "shared"]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(device, "CHUNK", 256)  # several pieces per message
    cupy.LOG.clear()
    yield


class Impatient(ThreadTransport):
    """Like MPI it knows no streams: it sends what memory holds now, and writes what it receives at once."""

    def send(self, array: Any, dest: int) -> None:
        cupy.LOG.append(("message", array.nbytes, type(array).__module__))
        super().send(cupy.bits_of(array), dest)

    def receive(self, array: Any, source: int) -> None:
        super().receive(cupy.bits_of(array), source)

    def split(self, color: int | None) -> Any:
        part = super().split(color)
        return part and Impatient(part.board, part.rank, part.size)


def on_lanes(size: int, way: str, aware: bool, function: Callable[[Lane], Any], hosts: Any = ()) -> list[Any]:
    """function(lane) on `size` ranks at once, each with a stream of its own."""

    def rank_main(transport: ThreadTransport) -> Any:
        place = Place(size, way in ("shared", "hierarchical"), forced_on_gpu=way, cuda_aware=aware, hosts=hosts)
        lane = Lane(Impatient(transport.board, transport.rank, size), place)
        with cupy.Stream():
            result = function(lane)
        lane.leave()
        return result

    return run_ranks(size, rank_main)


def produced(lane: Lane, length: int, dtype: Any = np.float32) -> Any:
    """An array that holds i % 7 + rank once its stream has come so far."""
    array = cupy.empty(length, dtype)
    array[...] = np.arange(length) % 7 + lane.transport.rank
    return array


def summed(lane: Lane, array: Any, name: str = "x", wait: bool = True) -> Any:
    def work(lane: Lane) -> Any:
        allreduce(lane.transport, lane.workspace, lane.place, array, Reduction())
        return array

    request = Request(Signature("allreduce", name), work)
    gpu.on_gpu(lane, request, array)
    return lane.run(request) if wait else lane.submit(request)


def expected(size: int, length: int) -> Any:
    return np.arange(length) % 7 * size + size * (size - 1) // 2


@pytest.mark.parametrize("aware", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("way", WAYS)
def test_sums_are_right_though_nothing_runs_before_its_wait(way: str, aware: bool) -> None:
    for size in (1, 2, 3, 4):
        for length in (0, 1, size + 1, 1000):
            def rank_main(lane: Lane, length: int = length) -> Any:
                return [summed(lane, produced(lane, length), name).get() for name in "abc"]

            for results in on_lanes(size, way, aware, rank_main):
                for result in results:
                    np.testing.assert_array_equal(result, expected(size, length))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("way", ["ring", "shared"])
def test_dtypes(way: str, dtype: str) -> None:
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    for result in on_lanes(3, way, False, lambda lane: summed(lane, produced(lane, 500, kind)).get()):
        np.testing.assert_array_equal(result.astype(np.float64), expected(3, 500))


@pytest.mark.parametrize("aware", [True, False], ids=["direct", "staged"])
def test_hosts_exchange_between_shared_parts(aware: bool) -> None:
    hosts = ((0, 1), (2, 3))
    for result in on_lanes(4, "auto", aware, lambda lane: summed(lane, produced(lane, 999)).get(), hosts):
        np.testing.assert_array_equal(result, expected(4, 999))


@pytest.mark.parametrize("aware", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("way", WAYS)
def test_without_our_waiting_sums_are_wrong(way: str, aware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tests above would see: the lane reads what the producer's stream has not written."""
    monkeypatch.setattr(Mark, "wait", lambda self: None)
    results = on_lanes(2, way, aware, lambda lane: summed(lane, produced(lane, 1000)).get())
    assert not all(np.array_equal(result, expected(2, 1000)) for result in results)


@pytest.mark.parametrize("way", ["ring", "shared"])
def test_without_the_wait_before_messages_sums_are_wrong(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane's own stream has not added what MPI would send, or what a peer would read."""
    monkeypatch.setattr(device, "finish", lambda array: None)
    monkeypatch.setattr(device.DirectTransport, "barrier", lambda self: self.base.barrier())
    results = on_lanes(3, way, True, lambda lane: summed(lane, produced(lane, 1000)).get())
    assert not all(np.array_equal(result, expected(3, 1000)) for result in results)


def test_without_the_consumers_wait_it_reads_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mark, "precede", lambda self: None)
    results = on_lanes(2, "ring", False, lambda lane: summed(lane, produced(lane, 1000)).get())
    assert not all(np.array_equal(result, expected(2, 1000)) for result in results)


def test_the_order_of_calls() -> None:
    """mark | wait for it | add | synchronize the lane's stream | message | mark the end | the consumer's stream waits."""

    def rank_main(lane: Lane) -> tuple[int, int]:
        array = produced(lane, 64)
        mine = cupy.get_current_stream().ptr
        summed(lane, array, wait=False).wait()
        return mine, lane.gpu.stream.ptr

    ((mine, lanes),) = on_lanes(1, "ring", True, rank_main)
    marked = next(i for i, entry in enumerate(cupy.LOG) if entry[0] == "record" and entry[2] == mine)
    event = cupy.LOG[marked][1]
    assert cupy.LOG[marked + 1] == ("wait for event", event)
    ended = next(i for i, entry in enumerate(cupy.LOG) if entry[0] == "record" and entry[2] == lanes)
    assert ended > marked and cupy.LOG[ended + 1] == ("stream waits", mine, cupy.LOG[ended][1])


@pytest.mark.parametrize("way", WAYS)
def test_messages_follow_a_synchronization_of_the_lanes_stream(way: str) -> None:
    """Between a message of device memory and the one before there is one; and nobody waits for anything else."""
    on_lanes(2, way, True, lambda lane: summed(lane, produced(lane, 1000)))
    waits = {entry[0] for entry in cupy.LOG}
    assert "synchronize device" not in waits
    log = [entry for entry in cupy.LOG if entry[0] in ("synchronize", "message")]
    of_device = [i for i, entry in enumerate(log) if entry[0] == "message" and entry[2].endswith("cupy")]
    assert bool(of_device) == (way != "shared")
    if of_device:
        assert sum(entry[0] == "synchronize" for entry in log) >= len(of_device)


def test_staging_never_gives_device_memory_to_messages() -> None:
    for way in ("ring", "halving_doubling", "doubling"):
        on_lanes(3, way, False, lambda lane: summed(lane, produced(lane, 1000)))
    messages = [entry for entry in cupy.LOG if entry[0] == "message"]
    assert messages and not [entry for entry in messages if entry[2].endswith("cupy")]


def test_staging_fetches_ahead() -> None:
    """The copy of the next piece starts before the message of this one: 1000 float32 in pieces of 256 bytes."""

    def rank_main(lane: Lane) -> None:
        side = gpu.side_of(lane, gpu.gpu_of(cupy.empty(1)))
        with side.working():
            cupy.LOG.clear()
            if lane.transport.rank == 0:
                side.transport.send(cupy.zeros(1000, np.float32), 1)
            lane.transport.barrier()
            if lane.transport.rank == 1:
                order = [entry[0] for entry in cupy.LOG if entry[0] in ("to host", "message")]
                assert order[:5] == ["to host", "to host", "message", "to host", "message"]
                assert order.count("message") == 16

    on_lanes(2, "ring", False, rank_main)


def test_arrays_live_until_the_gpu_has_passed_their_work() -> None:
    def rank_main(lane: Lane) -> None:
        array = produced(lane, 10)
        alive = weakref.ref(array)
        request = Request(Signature("add", "x"), lambda lane, array=array: array.__iadd__(1).size)
        gpu.on_gpu(lane, request, array)
        handle = lane.submit(request)
        handle.wait()
        ending = handle.ending
        del array, handle, request
        gc.collect()
        assert alive() is not None and not ending.passed
        ending.wait()
        summed(lane, produced(lane, 10), "y")
        gc.collect()
        assert alive() is None

    on_lanes(1, "ring", True, rank_main)


def test_a_framework_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that it has issued on its current stream is waited for, and it waits for the result."""
    monkeypatch.setattr(arrays, "FOLLOWED", [])

    def rank_main(lane: Lane) -> Any:
        other = cupy.Stream()
        arrays.follow(lambda number: other.ptr)
        with other:
            array = produced(lane, 100)
        summed(lane, array)
        with other:
            return array.get()

    for result in on_lanes(1, "ring", True, rank_main):
        np.testing.assert_array_equal(result, expected(1, 100))
    assert arrays.callers_streams(cupy, 0)[1:]  # CuPy's and the framework's


def test_a_collective_in_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.runtime, "streamIsCapturing", lambda stream: True)
    with pytest.raises(HvdliteError, match="CUDA graph"):
        on_lanes(1, "ring", True, lambda lane: summed(lane, produced(lane, 3)))


def test_a_second_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(lane: Lane) -> None:
        array = produced(lane, 3)
        summed(lane, array)
        monkeypatch.setattr(gpu, "device_of", lambda array: 1)
        with pytest.raises(HvdliteError, match="GPU 1, but this process communicates from GPU 0"):
            summed(lane, array, "y")

    on_lanes(1, "ring", True, rank_main)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("way", ["ring", "shared"])
def test_a_round_of_mixed_buckets(way: str, overlap: bool) -> None:
    """Parameters on the host and on the GPU, packed in the order of a backward, three rounds."""
    specs = [Spec(f"p{i}", (40, i + 1), "float32", "cuda" if i % 3 else "host") for i in range(12)]

    def rank_main(lane: Lane) -> list[Any]:
        where = gpu.gpu_of(cupy.empty(1))
        reducer = Reducer(lane, plan(specs, 8 * KB, 1 * KB), Reduction(), "r", overlap, where)
        found = []
        for step in range(3):
            for i in reversed(range(len(specs))):
                if i != 5:
                    reducer.views[i][...] = np.full(specs[i].shape, i + step + lane.transport.rank)
                    reducer.mark_ready(i, (step,))

            def load(index: int) -> Use:
                reducer.views[index][...] = 0
                return Use.UNUSED

            uses = reducer.finish_round(load, (step,))
            assert [use is Use.UNUSED for use in uses] == [i == 5 for i in range(len(specs))]
            found.append([v.get() if i % 3 else v.copy() for i, v in enumerate(reducer.views)])
        return found

    for size in (1, 2, 3):
        for rounds in on_lanes(size, way, False, rank_main):
            for step, views in enumerate(rounds):
                for i, view in enumerate(views):
                    want = 0 if i == 5 else size * (i + step) + size * (size - 1) // 2
                    np.testing.assert_array_equal(view, np.full(specs[i].shape, want))


def test_no_room_on_one_gpu_is_an_error_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    room, take = iter((True, False, True)), cupy.Memory

    def memory(nbytes: int) -> Any:
        if nbytes > KB and not next(room):
            raise cupy.CUDARuntimeError("out of memory")
        return take(nbytes)

    def rank_main(lane: Lane) -> Any:
        where = gpu.gpu_of(cupy.empty(1))
        monkeypatch.setattr(cupy.cuda, "Memory", memory)
        with pytest.raises(HvdliteError, match=r"ranks \[[012]\] have no room"):
            Reducer(lane, plan([Spec("p", (4000,), "float32", "cuda")], 8 * KB, KB), Reduction(), "r", False, where)

    on_lanes(3, "shared", True, rank_main)


def test_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for, it adds what it can; a communicator for each lane, which goes with it."""
    bus = iter(range(100))
    monkeypatch.setattr(cupy.runtime, "deviceGetPCIBusId", lambda number: next(bus))

    def rank_main(lane: Lane) -> Any:
        whole, half = summed(lane, produced(lane, 99)), summed(lane, produced(lane, 99, np.int16), "y")
        assert cupy.NcclCommunicator.open == 3
        return whole.get(), half.get()

    for results in on_lanes(3, "nccl", False, rank_main):
        for result in results:
            np.testing.assert_array_equal(result, expected(3, 99))
    assert cupy.NcclCommunicator.open == 0


def test_nccl_wants_a_gpu_for_each_rank() -> None:
    def rank_main(lane: Lane) -> None:
        with pytest.raises(HvdliteError, match=r"ranks \[0, 1\] share GPU 0000:00:00.0"):
            summed(lane, produced(lane, 3))

    on_lanes(2, "nccl", False, rank_main)


def test_a_new_plan_closes_the_memory_of_the_old_one() -> None:
    """Every opened handle is closed, and every allocation is let go of."""
    specs = [Spec("p", (40,), "float32", "cuda")]

    def rank_main(lane: Lane) -> None:
        where = gpu.gpu_of(cupy.empty(1))
        for _ in range(5):
            Reducer(lane, plan(specs, 8 * KB, 1 * KB), Reduction(), "r", False, where)

    before = in_use()
    on_lanes(3, "shared", True, rank_main)
    assert [entry[0] for entry in cupy.LOG].count("open") == [entry[0] for entry in cupy.LOG].count("close") == 5 * 6
    assert in_use() == before


def in_use() -> int:
    """The number of allocations, when the GPU has nothing left to do."""
    for stream in list(cupy.Stream.known.values()):
        stream.run_to(stream.issued)
    gc.collect()
    return cupy.Allocation.made - cupy.Allocation.gone
