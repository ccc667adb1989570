"""Any picklable object between ranks, as Horovod's `broadcast_object` and `allgather_object`."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite import ops, runtime
from hvdlite.arrays import Array
from hvdlite.calls import calling
from hvdlite.ops.common import root_of
from hvdlite.process_sets import ProcessSet


@dataclass(frozen=True)
class Unpicklable:
    """What others get in place of a rank's object, so that all learn what is wrong with it."""

    rank: int
    why: str


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
    data, cause = pickled(obj) if mine else (np.empty(0, np.uint8), None)
    length = np.array([data.size], np.int64)
    ops.broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not mine:
        data = np.empty(int(length[0]), np.uint8)
    ops.broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if mine and cause is None else unpickled(data, 1, cause)[0]


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, in rank order, on every rank. Waits for all. Raises pickle.PicklingError on every rank where
    one cannot be pickled."""
    group, title = runtime.group_of(process_set), called("allgather_object", name)
    name = name or f"object.{group.serial('allgather_object')}"
    data, cause = pickled(obj)
    with calling(title):
        everyones = ops.allgather(data, f"{name}.t", process_set)
    return unpickled(everyones, group.size, cause)


def called(function: str, name: str | None) -> str:
    """The call in messages."""
    return f"hvd.{function}" if name is None else f"hvd.{function}(name={name!r})"


def pickled(obj: Any) -> tuple[Array, Exception | None]:
    """As bytes; those of an Unpicklable, and the reason, where it cannot be."""
    import cloudpickle  # 50 ms, not for every user of hvdlite

    cause = None
    try:
        data = cloudpickle.dumps(obj)
    except Exception as error:
        cause = error
        data = pickle.dumps(Unpicklable(runtime.rank(), f"{type(error).__name__}: {error}"))
    return np.frombuffer(data, np.uint8), cause


def unpickled(data: Array, count: int, cause: Exception | None) -> list[Any]:
    """So many objects, one behind the other. Raises pickle.PicklingError where any is an Unpicklable; cause: why this
    rank's is."""
    stream = io.BytesIO(data) if count > 1 else None
    found = [pickle.load(stream) for _ in range(count)] if stream else [pickle.loads(data)]  # where it lies
    for each in found:
        if isinstance(each, Unpicklable):
            raise pickle.PicklingError(f"rank {each.rank}'s object cannot be pickled: {each.why}") from cause
    return found
