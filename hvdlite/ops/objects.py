"""Picklable objects between ranks: Horovod's `broadcast_object` and `allgather_object`.

Large arrays inside an object do not go through its pickle. They travel from their own memory into memory that the
receiver's object keeps (out-of-band buffers of pickle's protocol 5). Rejected: one stream for all ranks' objects, which
took up to 20 times as long and three times the memory, mostly for page faults.
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
"""An array inside an object travels by itself if it has at least this size."""


@dataclass(frozen=True)
class Unpicklable:
    """Takes the place of an object that cannot be pickled, so that every rank can report the rank and the reason."""

    rank: int
    why: str


@dataclass(frozen=True)
class Packet:
    """An object on its way.

    Attributes:
        stream: The pickle, then the sizes of the large arrays, their number, and the length of the pickle. The size of
            a read-only array is negative.
        buffers: The large arrays' bytes.
        cause: Why an `Unpicklable` has the object's place; None if the object could be pickled.
    """

    stream: Array
    buffers: Sequence[Array] = ()
    cause: Exception | None = None


def broadcast_object(
    obj: object = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Give every rank the object of one rank. Collective; waits for all ranks of the process set.

    Args:
        obj: Any object that cloudpickle can pickle, on root_rank. Other ranks' objects are ignored.
        root_rank: A global rank.
        name: The operation's name, equal on all ranks. Calls without a name are matched by their order.
        process_set: The ranks that take part. Default: all ranks.

    Returns:
        The object itself on root_rank, and a copy on the other ranks.

    Raises:
        pickle.PicklingError: The object cannot be pickled. Every rank raises it.
        ValueError: `root_rank` is no member of the process set.
    """
    with calling(called("broadcast_object", name)):
        return broadcast_pickled(obj, root_rank, name, process_set)


def broadcast_pickled(obj: object, root_rank: int, name: str | None, process_set: ProcessSet | None) -> object:
    """As `broadcast_object`: broadcast the length, the stream, and the large arrays."""
    group = runtime.group_of(process_set)
    root_of(group, "broadcast_object", root_rank)  # raises before a number is taken
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


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Give every rank the objects of all ranks. Collective; waits for all ranks of the process set.

    Args:
        obj: Any object that cloudpickle can pickle. Its type may differ between ranks.
        name: As for `broadcast_object`.
        process_set: As for `broadcast_object`.

    Returns:
        A copy of each rank's object, in rank order.

    Raises:
        pickle.PicklingError: A rank's object cannot be pickled. Every rank raises it.
    """
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
    """Return the user's call for messages."""
    return f"hvd.{function}" if name is None else f"hvd.{function}(name={name!r})"


def pickled(obj: object) -> Packet:
    """Pickle the object, or an `Unpicklable` in its place."""
    import cloudpickle  # takes 50 ms, which a mere `import hvdlite` need not pay

    large: list[Array] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        """Return whether an array's bytes go into the pickle."""
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


def unpickled(stream: Array, buffers: Sequence[Array], cause: Exception | None) -> object:
    """Return a packet's object, which keeps the buffers. Raises pickle.PicklingError for an `Unpicklable`.

    Args:
        stream: As in `Packet`.
        buffers: As in `Packet`.
        cause: The cause of that error, if this rank's own object could not be pickled.
    """
    sizes = sizes_in(stream)
    memories = [each.data if size > 0 else each.data.toreadonly()
                for size, each in zip(sizes, buffers, strict=True)]  # fmt: skip
    found = pickle.loads(stream.data, buffers=memories)
    if isinstance(found, Unpicklable):
        raise pickle.PicklingError(f"rank {found.rank}'s object cannot be pickled: {found.why}") from cause
    return found


def numbers(stream: Array, end: int, count: int) -> list[int]:
    """Read `count` integers of 8 bytes; the last one ends at byte `end`."""
    return [int(each) for each in np.frombuffer(stream[end - 8 * count : end].tobytes(), np.int64)]


def sizes_in(stream: Array) -> list[int]:
    """Read the sizes of the large arrays from a stream's end."""
    count, _ = numbers(stream, stream.size, 2)
    return numbers(stream, stream.size - 16, count)


def split(streams: Array, count: int) -> list[Array]:
    """Divide the concatenated streams of `count` ranks."""
    found, end = list[Array](), streams.size
    for _ in range(count):
        several, length = numbers(streams, end, 2)
        start = end - 16 - 8 * several - length
        found.insert(0, streams[start:end])
        end = start
    return found
