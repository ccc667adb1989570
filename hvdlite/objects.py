"""Any picklable object between ranks, as Horovod's `broadcast_object` and `allgather_object`."""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import numpy as np

from hvdlite import ops, runtime
from hvdlite.process_sets import ProcessSet


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """root_rank's object, on every rank. The root gets its own back; the others an unpickled copy.

    name: of the operation; equal on all ranks (the type of the object does not matter, it may differ).
    """
    import cloudpickle  # 50 ms, not for every user of hvdlite

    name = name or f"object.{runtime.group_of(process_set).serial('broadcast_object')}"
    mine = runtime.rank() == root_rank
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8).copy() if mine else np.empty(0, np.uint8)
    length = np.array([data.size], np.int64)
    ops.broadcast_(length, root_rank, f"{name}.sz", process_set)
    if not mine:
        data = np.empty(int(length[0]), np.uint8)
    ops.broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if mine else pickle.loads(data.tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet | None = None) -> list[Any]:
    """Every rank's object, in rank order, on every rank."""
    import cloudpickle

    name = name or f"object.{runtime.group_of(process_set).serial('allgather_object')}"
    data = np.frombuffer(cloudpickle.dumps(obj), np.uint8)
    lengths = ops.allgather(np.array([data.size], np.int64), f"{name}.sz", process_set)
    everything = ops.allgather(data, f"{name}.t", process_set)
    bounds = np.cumsum([0, *lengths])
    return [pickle.loads(everything[start:stop].tobytes()) for start, stop in pairwise(bounds)]
