"""Any picklable object between ranks, as Horovod's `broadcast_object` and `allgather_object`.

Large arrays inside an object do not go through its pickle: they travel from the memory where they lie into memory that
the receiver's object keeps (pickle protocol 5, out-of-band buffers). Rejected: one stream for all ranks' objects. Two
ranks with 300 MB each held 2.4 GB each, and page faults took most of 1.1 to 6.2 s; now 0.9 GB and 0.1 to 0.3 s.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite import ops
from hvdlite.arrays import Array
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.calls import calling
from hvdlite.ops.common import root_of

LARGE_BYTES = 64 * 1024
"""From which size on an array inside an object travels by itself."""


@dataclass(frozen=True)
class Unpicklable:
    """What others get in place of a rank's object, so that all learn what is wrong with it."""

    rank: int
    why: str


@dataclass(frozen=True)
class Packet:
    """An object on its way. stream: its pickle, then the sizes of its large arrays (negative where one is read-only),
    their number, and the length of the pickle. buffers: the large arrays' bytes. cause: why an Unpicklable is in the
    object's place."""

    stream: Array
    buffers: Sequence[Array] = ()
    cause: Exception | None = None


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """root_rank's object, on every rank. The root gets its own back; the others an unpickled copy. Waits for all.

    name: of the operation; equal on all ranks (the type of the object does not matter, it may differ). Raises
    pickle.PicklingError on every rank where the root's cannot be pickled.
    """
    with calling(called("broadcast_object", name)):
        return broadcast_pickled(obj, root_rank, name, process_set)


def broadcast_pickled(obj: Any, root_rank: int, name: str | None, process_set: ProcessSet | None) -> Any:
    """`broadcast_object`, as two broadcasts."""
    group = runtime.group_of(process_set)
    root_of(group, "broadcast_object", root_rank)  # before the call is counted: what is refused is none
    name = name or f"object.{group.serial('broadcast_object')}"
    mine = runtime.rank() == root_rank
    packet = pickled(obj) if mine else Packet(np.empty(0, np.uint8))
    length = np.array([packet.stream.size], np.int64)
    ops.broadcast_(length, root_rank, f"{name}.sz", process_set)
    stream = packet.stream if mine else np.empty(int(length[0]), np.uint8)
    ops.broadcast_(stream, root_rank, f"{name}.t", process_set)
    sizes = sizes_in(stream)
    buffers = packet.buffers if mine else [np.empty(abs(size), np.uint8) for size in sizes]
    if buffers:
        ops.broadcast_several_(buffers, root_rank, f"{name}.buffers", process_set)
    return obj if mine and packet.cause is None else unpickled(stream, buffers, packet.cause)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, in rank order, on every rank. Waits for all. Raises pickle.PicklingError on every rank where
    one cannot be pickled."""
    group, title = runtime.group_of(process_set), called("allgather_object", name)
    name = name or f"object.{group.serial('allgather_object')}"
    packet = pickled(obj)
    with calling(title):
        streams = split(ops.allgather(packet.stream, f"{name}.t", process_set), group.size)
        lengths = [[abs(size) for size in sizes_in(stream)] for stream in streams]
        buffers: list[list[Array]] = [[] for _ in streams]
        if any(lengths):
            buffers = ops.allgather_several(packet.buffers, lengths, f"{name}.buffers", process_set)
    return [unpickled(stream, its, packet.cause) for stream, its in zip(streams, buffers, strict=True)]


def called(function: str, name: str | None) -> str:
    """The call in messages."""
    return f"hvd.{function}" if name is None else f"hvd.{function}(name={name!r})"


def pickled(obj: Any) -> Packet:
    """The object, or an Unpicklable in its place."""
    import cloudpickle  # 50 ms, not for every user of hvdlite

    large: list[Array] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        """Whether an array's bytes go into the pickle."""
        memory = np.frombuffer(buffer.raw(), np.uint8)
        if memory.size >= LARGE_BYTES:
            large.append(memory)
        return memory.size < LARGE_BYTES

    file, cause = io.BytesIO(), None
    try:
        cloudpickle.Pickler(file, protocol=5, buffer_callback=stays).dump(obj)
    except Exception as error:
        cause, file, large = error, io.BytesIO(), []
        pickle.dump(Unpicklable(runtime.rank(), f"{type(error).__name__}: {error}"), file)
    sizes = [memory.size if memory.flags.writeable else -memory.size for memory in large]
    file.write(np.array([*sizes, len(sizes), file.tell()], np.int64).tobytes())
    return Packet(np.frombuffer(file.getbuffer(), np.uint8), large, cause)


def unpickled(stream: Array, buffers: Sequence[Array], cause: Exception | None) -> Any:
    """The object, which keeps the buffers. Raises pickle.PicklingError for an Unpicklable; cause: why this rank's is
    one."""
    sizes = sizes_in(stream)
    memories = [each.data if size > 0 else each.data.toreadonly()
                for size, each in zip(sizes, buffers, strict=True)]  # fmt: skip
    found = pickle.loads(stream.data, buffers=memories)
    if isinstance(found, Unpicklable):
        raise pickle.PicklingError(f"rank {found.rank}'s object cannot be pickled: {found.why}") from cause
    return found


def numbers(stream: Array, end: int, count: int) -> list[int]:
    """So many whole numbers that end at this byte."""
    return [int(each) for each in np.frombuffer(stream[end - 8 * count : end].tobytes(), np.int64)]


def sizes_in(stream: Array) -> list[int]:
    """Of the large arrays, as they stand at a stream's end."""
    count, _ = numbers(stream, stream.size, 2)
    return numbers(stream, stream.size - 16, count)


def split(streams: Array, count: int) -> list[Array]:
    """The streams of so many ranks, which lie one after the other."""
    found, end = list[Array](), streams.size
    for _ in range(count):
        several, length = numbers(streams, end, 2)
        start = end - 16 - 8 * several - length
        found.insert(0, streams[start:end])
        end = start
    return found
