"""Chunks on a GPU, tested on the pretend CuPy (tests/pretend).

While a chunk is added, the messages of the next chunks are under way, and each message begins as soon as it may.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.algorithms import pipeline
from hvdlite.algorithms.pipeline import SLOTS, Step, chunk_length, in_chunks, scratch_length
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import longest_part, parts, prepared_reduce_scatter
from hvdlite.arrays import LINE
from hvdlite.lanes import gpu_side
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.request import Request
from hvdlite.lanes.signature import Signature
from hvdlite.lanes.workplace import Workplace
from hvdlite.transports import device
from tests.pretend import cupy
from tests.pretend.lanes import expected, on_lanes, produced, stand_in, stream_of, summed  # noqa: F401

HERE = np.empty(0, np.float32)
LENGTH = 1536  # float32: 8 chunks of 384 bytes in each of 2 parts


def scattered(lane: Lane) -> Any:
    """The ring's reduce-scatter of i % 7 + rank on a GPU.

    Returns this rank's part of the sum, and its lane's stream.
    """
    array = produced(lane, LENGTH)

    def work(lane: Workplace) -> None:
        pieces = parts(array, lane.transport.size)
        scratch = lane.workspace.scratch(array, scratch_length(pieces[0].size, array))
        cupy.LOG.append(("begin", lane.transport.rank))
        prepared_reduce_scatter(lane.transport, pieces, scratch, Reduction())()
        cupy.LOG.append(("end", lane.transport.rank))

    request = Request(Signature("test", "x"), work)
    gpu_side.on_gpu(lane, request, array)
    lane.run(request)
    mine = (lane.transport.rank + 1) % lane.transport.size
    found: Any = parts(array, lane.transport.size)[mine]
    wanted = parts(expected(lane.transport.size, LENGTH), lane.transport.size)[mine]
    return np.array_equal(found.get(), wanted), stream_of(lane)


def of_rank(rank: int, stream: int) -> list[tuple[str, Any]]:
    """What this rank did between "begin" and "end", in order. An event's name is the number of adds issued before it."""
    first, last = cupy.LOG.index(("begin", rank)), cupy.LOG.index(("end", rank))
    adds, behind, found = 0, {}, []
    for kind, *facts in cupy.LOG[first:last]:
        if kind == "add" and facts == [stream]:
            adds += 1
            found.append(("add", adds))
        elif kind == "record" and facts[1] == stream:
            behind[facts[0]] = adds
        elif kind in ("wait for event", "stream waits") and facts[-1] in behind:
            found.append((kind, behind[facts[-1]]))
        elif kind == "message" and facts[2] == rank:
            found.append(("message", facts[0]))
        elif kind.startswith("synchronize"):
            assert facts != [stream], "waits for all of its stream"
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_message_starts_when_the_add_three_chunks_before_is_done(size: int) -> None:
    """The message does not wait for the whole stream: the add of chunk k-2 is issued, and is not waited for."""
    results = on_lanes(size, "ring", True, scattered)
    assert all(right for right, _ in results)
    longest = longest_part(np.empty(LENGTH, np.float32), size)
    count = (size - 1) * len(
        in_chunks([Step(np.empty(longest), 0, np.empty(longest), 0)], longest, chunk_length(longest, HERE))
    )
    nbytes = 4 * chunk_length(longest, HERE)
    for rank, (_, stream) in enumerate(results):
        wanted: list[tuple[str, Any]] = []
        for k in range(count):
            wanted += [("wait for event", max(k - SLOTS + 1, 0)), ("message", nbytes)]
            wanted += [("add", k)] if k > 0 else []
        found = [(kind, min(fact, nbytes) if kind == "message" else fact) for kind, fact in of_rank(rank, stream)]
        if size == 2:  # the chunks are equal
            assert found == [*wanted, ("add", count)]
        else:
            assert [kind for kind, _ in found] == [kind for kind, _ in [*wanted, ("add", count)]]
            assert [f for kind, f in found if kind != "message"] == [
                f for kind, f in [*wanted, ("add", count)] if kind != "message"
            ]


def test_staged_pieces_are_fetched_behind_the_add_three_chunks_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream that copies to the host waits for that add on the GPU.

    The next piece's copy begins before this piece's message.
    """
    monkeypatch.setattr(device, "CHUNK", 384)
    results = on_lanes(2, "ring", False, scattered)
    assert all(right for right, _ in results)
    for rank, (_, stream) in enumerate(results):
        found = [entry for entry in of_rank(rank, stream) if entry[0] != "wait for event"]
        kinds = {"stream waits": "fetch", "message": "message", "add": "add"}
        order = [(kinds[kind], fact) for kind, fact in found]
        wanted = [("fetch", 0)]
        for k in range(8):
            wanted += [("fetch", max(k + 1 - SLOTS + 1, 0))] if k < 7 else []
            wanted += [("message", 384), ("add", k + 1)]
        assert order == wanted


def right_sums(size: int, aware: bool, length: int = LENGTH) -> bool:
    results = on_lanes(size, "ring", aware, lambda lane: summed(lane, produced(lane, length)).get())
    return all(np.array_equal(result, expected(size, length)) for result in results)


@pytest.mark.parametrize("size", [2, 3])
def test_without_the_wait_for_the_add_sums_are_wrong(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 2 ranks a slot is overwritten before it is added. On 3 ranks a chunk is also sent before it is computed."""
    assert right_sums(size, True)

    def hasty(self: Any, send: Any, dest: int, receive: Any, source: int, after: Any = None) -> Any:
        return self.base.start_exchange(send, dest, receive, source)

    monkeypatch.setattr(device.DirectTransport, "start_exchange", hasty)
    assert not right_sums(size, True)


@pytest.mark.parametrize(("what", "length"), [("follow", 576), ("copied", 864), ("emptied", 864)])
def test_without_the_waits_of_staging_sums_are_wrong(what: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging waits for a piece's computation, for its copy to the host, and for the previous copy from its buffer.

    Each step has 2 or 3 chunks of one piece. With other numbers, one of these waits could replace another.
    """
    monkeypatch.setattr(device, "CHUNK", 384)
    assert right_sums(3, False, length)
    if what == "follow":
        monkeypatch.setattr(device.Staging, "follow", lambda self, after: None)
    elif what == "copied":
        monkeypatch.setattr(device.Fetched, "bytes", lambda self: self.buffer[: self.nbytes])
    else:
        vacant = device.Staging.vacant

        def hasty(self: Any, piece: Any) -> Any:
            self.emptied = [None, None]
            return vacant(self, piece)

        monkeypatch.setattr(device.Staging, "vacant", hasty)
    assert not right_sums(3, False, length)


@pytest.mark.parametrize("nbytes", [4, 100, 1 << 20])
def test_chunks_cover_each_array_and_are_no_fewer_than_slots(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "WHOLE", nbytes)
    monkeypatch.setattr(pipeline, "CHUNK", nbytes)
    for longest in (0, 1, 2, 3, 15, 16, 17, 25, 26, 1000):
        length = chunk_length(longest, HERE)
        arrays = [np.arange(longest), np.arange(max(longest - 1, 0)), np.arange(0)]
        steps = [Step(array, 1, array, 1) for array in arrays]
        assert length * 4 <= -(-nbytes // LINE) * LINE and scratch_length(longest, HERE) <= min(longest, SLOTS * length)
        if longest:
            chunks = in_chunks(steps, longest, length)
            each = len(chunks) // len(steps)
            assert each * len(steps) == len(chunks) and scratch_length(longest, HERE) > (min(each, SLOTS) - 1) * length
            for i, array in enumerate(arrays):
                cut = [step.outgoing for step in chunks[i * each : (i + 1) * each]]
                np.testing.assert_array_equal(np.concatenate(cut), array)
