"""The order of work on a GPU, tested without one, on the pretend CuPy (tests/pretend).

Its streams do nothing until something waits for them, and messages read and write memory at once, as MPI does.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvdlite import gpu_streams
from hvdlite.errors import HvdliteError
from hvdlite.gpu_streams import Mark
from hvdlite.lanes import gpu_side
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.memory import cuda_ipc
from hvdlite.transports import device
from tests.by_messages import BY_MESSAGES
from tests.pretend import cupy
from tests.pretend.lanes import expected, on_lanes, produced, stand_in, stream_of, summed  # noqa: F401

WAYS = [*BY_MESSAGES, "shared"]


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
    """The tests above can fail: without the wait, the lane reads memory before the producer's stream writes it."""
    monkeypatch.setattr(Mark, "wait", lambda self: None)
    results = on_lanes(2, way, aware, lambda lane: summed(lane, produced(lane, 1000)).get())
    assert not all(np.array_equal(result, expected(2, 1000)) for result in results)


@pytest.mark.parametrize("way", ["ring", "shared"])
def test_without_the_wait_before_messages_sums_are_wrong(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, MPI would send a sum, or a peer would read it, before the lane's stream has added it."""
    monkeypatch.setattr(device, "finish", lambda array: None)
    monkeypatch.setattr(device.DirectTransport, "barrier", lambda self: self.base.barrier())
    results = on_lanes(3, way, True, lambda lane: summed(lane, produced(lane, 1000)).get())
    assert not all(np.array_equal(result, expected(3, 1000)) for result in results)


def test_without_the_consumers_wait_it_reads_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mark, "precede", lambda self: None)
    results = on_lanes(2, "ring", False, lambda lane: summed(lane, produced(lane, 1000)).get())
    assert not all(np.array_equal(result, expected(2, 1000)) for result in results)


def test_the_order_of_calls() -> None:
    """Mark; wait for it; add; synchronize the lane's stream; message; mark the end; the consumer's stream waits."""

    def rank_main(lane: Lane) -> tuple[int, int]:
        array = produced(lane, 64)
        mine = cupy.get_current_stream().ptr
        summed(lane, array, wait=False).wait()
        return mine, stream_of(lane)

    ((mine, lanes),) = on_lanes(1, "ring", True, rank_main)
    marked = next(i for i, entry in enumerate(cupy.LOG) if entry[0] == "record" and entry[2] == mine)
    event = cupy.LOG[marked][1]
    assert cupy.LOG[marked + 1 : marked + 3] == [("use", "hvdlite-lane"), ("wait for event", event)]
    ended = next(i for i, entry in enumerate(cupy.LOG) if entry[0] == "record" and entry[2] == lanes)
    assert ended > marked and cupy.LOG[ended + 1] == ("stream waits", mine, cupy.LOG[ended][1])


@pytest.mark.parametrize("way", WAYS)
def test_messages_follow_a_wait_for_the_lanes_stream(way: str) -> None:
    """Before a message of device memory, its rank has waited for its lane's stream or an event of it."""
    streams = on_lanes(2, way, True, lambda lane: summed(lane, produced(lane, 1000)) and stream_of(lane))
    assert bool([entry for entry in cupy.LOG if entry[0] == "message" and entry[2].endswith("cupy")]) == (
        way != "shared"
    )
    for rank, stream in enumerate(streams):
        events = {entry[1] for entry in cupy.LOG if entry[0] == "record" and entry[2] == stream}
        waited = False
        for kind, *facts in cupy.LOG:
            if (kind, facts) == ("synchronize", [stream]) or (kind == "wait for event" and facts[0] in events):
                waited = True
            elif kind == "message" and facts[1].endswith("cupy") and facts[2] == rank:
                assert waited
                waited = False


def test_staging_never_gives_device_memory_to_messages() -> None:
    for way in BY_MESSAGES:
        on_lanes(3, way, False, lambda lane: summed(lane, produced(lane, 1000)))
    messages = [entry for entry in cupy.LOG if entry[0] == "message"]
    assert messages and not [entry for entry in messages if entry[2].endswith("cupy")]


def test_staging_fetches_ahead() -> None:
    """The copy of the next piece starts before the message of this piece: 1000 float32 in pieces of 256 bytes."""

    def rank_main(lane: Lane) -> None:
        side = gpu_side.side_of(lane.host, gpu_side.gpu_of(cupy.empty(1)))
        with side.working():
            cupy.LOG.clear()
            lane.transport.barrier()  # both ranks have one log
            if lane.transport.rank == 0:
                side.transport.send(cupy.zeros(1000, np.float32), 1)
            lane.transport.barrier()
            if lane.transport.rank == 1:
                order = [entry[0] for entry in cupy.LOG if entry[0] in ("to host", "message")]
                assert order[:5] == ["to host", "to host", "message", "to host", "message"]
                assert order.count("message") == 16

    on_lanes(2, "ring", False, rank_main)


def test_arrays_live_until_the_gpu_has_passed_their_work() -> None:
    def added(array: Any, lane: Workplace) -> int:
        array += 1
        return int(array.size)

    def rank_main(lane: Lane) -> None:
        array = produced(lane, 10)
        alive = weakref.ref(array)
        request = Request(Signature("add", "x"), partial(added, array))
        gpu_side.on_gpu(lane, request, array)
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


def test_results_live_until_the_gpu_has_written_them() -> None:
    """A result lives also if its caller drops it without waiting."""

    def rank_main(lane: Lane) -> None:
        results = []

        def work(lane: Workplace) -> Any:
            result = cupy.empty(10)
            result[...] = 1
            results.append(weakref.ref(result))
            return result

        request = Request(Signature("make", "x"), work)
        gpu_side.on_gpu(lane, request, produced(lane, 10))
        handle = lane.submit(request)
        handle.wait()
        ending = handle.ending
        del handle, request
        gc.collect()
        assert results[0]() is not None and not ending.passed
        ending.wait()
        summed(lane, produced(lane, 10), "y")
        gc.collect()
        assert results[0]() is None

    on_lanes(1, "ring", True, rank_main)


def test_new_memory_comes_from_the_callers_pool_behind_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may have freed that memory while its kernels still read it."""
    made: list[int] = []

    def rank_main(lane: Lane) -> None:
        workspace, like = gpu_side.GpuWorkspace(gpu_side.Gpu(cupy, 0)), cupy.empty(1)
        empty = cupy.empty
        monkeypatch.setattr(cupy, "empty", lambda *how: made.append(cupy.get_current_stream().ptr) or empty(*how))
        caller, frameworks, own = cupy.Stream(), cupy.Stream(), cupy.Stream()
        workspace.callers = (caller.ptr, frameworks.ptr)
        with own:
            workspace.new(like, (5,))
        waits = [entry[2] for entry in cupy.LOG if entry[:2] == ("stream waits", own.ptr)]
        assert [cupy.Event.known[event].stream for event in waits] == [caller, frameworks]
        assert made == [frameworks.ptr]

    on_lanes(1, "ring", True, rank_main)


def test_a_lanes_thread_takes_its_callers_gpu() -> None:
    def rank_main(lane: Lane) -> None:
        summed(lane, produced(lane, 10), wait=False).wait()
        names = [entry[1] for entry in cupy.LOG if entry[0] == "use"]
        assert names and set(names) == {"hvdlite-lane"}

    on_lanes(1, "ring", True, rank_main)


def test_a_lanes_thread_takes_the_gpu_of_work_without_a_mark() -> None:
    """Work without a mark: plans, and stand-ins of joined ranks."""

    def rank_main(lane: Lane) -> None:
        where = gpu_side.Gpu(cupy, 0)
        for number in range(2):
            lane.submit(Request(Signature("plan", f"{number}"), lambda lane: gpu_side.side_of(lane.host, where))).wait()
        assert ("use", "hvdlite-lane") in cupy.LOG
        while lane.turn.busy:
            time.sleep(0.001)
        cupy.LOG.clear()
        lane.run(Request(Signature("plan", "2"), lambda lane: gpu_side.side_of(lane.host, where)))
        assert not [entry for entry in cupy.LOG if entry[0] == "use"]  # the user's thread keeps its own GPU

    on_lanes(1, "ring", True, rank_main)


def test_room_is_made_before_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an arena is refused, unused memory of the framework and of the pool is freed.

    Only whole blocks can be freed.
    """
    given: list[str] = []
    asked: list[int] = []

    class Pool:
        def free_all_blocks(self) -> None:
            given.append("pool")

    class Memory(cupy.Memory):
        def __init__(self, nbytes: int) -> None:
            asked.append(nbytes)
            if nbytes > cuda_ipc.BLOCK or len(given) < 2:
                raise cupy.cuda.runtime.CUDARuntimeError("no room")
            super().__init__(nbytes)

    monkeypatch.setattr(gpu_streams, "RELIEF", [lambda: given.append("torch")])
    monkeypatch.setattr(cuda_ipc, "RELIEF", gpu_streams.RELIEF)
    monkeypatch.setattr(cupy, "get_default_memory_pool", Pool, raising=False)
    monkeypatch.setattr(cupy.cuda, "Memory", Memory)
    found = cuda_ipc.new(cupy, 64)
    assert found is not None and found.nbytes == 64 and given == ["torch", "pool"]
    assert cuda_ipc.new(cupy, cuda_ipc.BLOCK + 1) is None
    assert asked == [cuda_ipc.BLOCK] * 2 + [2 * cuda_ipc.BLOCK] * 2


def test_a_framework_has_streams_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """hvdlite waits for the framework's current stream, and that stream waits for the result."""
    monkeypatch.setattr(gpu_streams, "FOLLOWED", [])

    def rank_main(lane: Lane) -> Any:
        other = cupy.Stream()
        gpu_streams.FOLLOWED.append(lambda number: other.ptr)
        with other:
            array = produced(lane, 100)
        summed(lane, array)
        with other:
            return array.get()

    for result in on_lanes(1, "ring", True, rank_main):
        np.testing.assert_array_equal(result, expected(1, 100))
    assert gpu_streams.callers_streams(cupy, 0)[1:]  # CuPy's stream and the framework's


def test_a_collective_in_a_graph_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy.runtime, "streamIsCapturing", lambda stream: True)
    with pytest.raises(HvdliteError, match="CUDA graph"):
        on_lanes(1, "ring", True, lambda lane: summed(lane, produced(lane, 3)))


def test_a_second_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_main(lane: Lane) -> None:
        array = produced(lane, 3)
        summed(lane, array)
        monkeypatch.setattr(gpu_side, "device_of", lambda array: 1)
        with pytest.raises(HvdliteError, match="GPU 1, but this process communicates from GPU 0"):
            summed(lane, array, "y")

    on_lanes(1, "ring", True, rank_main)


class Context:
    """A GPU context that threads make current."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.cuda = self.driver = self

    def ctxGetCurrent(self) -> bool:
        return threading.get_ident() in self.threads

    def Device(self, number: int) -> Context:
        return self

    def use(self) -> None:
        self.threads.add(threading.get_ident())


def test_threads_in_mpi_are_waited_for_before_gpus_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that entered MPI before there was a GPU cannot copy GPU memory.

    Threads that enter later make the GPU current.
    """
    monkeypatch.setattr(gpu_streams, "GPUS_IN_MESSAGES", [])
    where, left, order = Context(), threading.Event(), []

    def long() -> None:
        left.wait()
        order.append("left MPI")

    def send() -> None:
        gpu_streams.send_from(where, 0)  # type: ignore[arg-type]
        order.append("sends")

    before = threading.Thread(target=gpu_streams.in_mpi, args=(long,))
    before.start()
    senders = [
        threading.Thread(target=gpu_streams.in_mpi, args=(send,)) for _ in range(2)
    ]  # neither waits for the other
    for sender in senders:
        sender.start()
    time.sleep(0.05)
    assert order == []
    later = threading.Thread(target=gpu_streams.in_mpi, args=(lambda: order.append(str(where.ctxGetCurrent())),))
    later.start()
    later.join()
    left.set()
    for thread in (before, *senders):
        thread.join()
    assert order == ["True", "left MPI", "sends", "sends"] and not gpu_streams.WITHOUT_GPU


def test_a_lane_whose_ranks_disagree_may_copy_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane's own thread enters MPI then, without a roll call before."""
    where = Context()
    monkeypatch.setattr(gpu_streams, "GPUS_IN_MESSAGES", [(where, 0)])

    def rank_main(lane: Lane) -> None:
        request = Request(Signature("plan", "x", (("rank", lane.transport.rank),)), lambda lane: None)
        with pytest.raises(HvdliteError, match="rank"):
            lane.run(request)
        assert lane.turn.thread is not None and lane.turn.thread.ident in where.threads

    on_lanes(2, "ring", True, rank_main)
