"""Collectives on NumPy or CuPy arrays: each builds a request for the eager lane of its process set.

Asynchronous first: a function ending in `_async` returns a `Handle`; its plain twin waits. Arrays are contiguous;
adapters turn a framework's tensors into arrays that share their memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np

from hvdlite import runtime
from hvdlite.algorithms import allreduce as reduce_over_ranks
from hvdlite.algorithms import movement
from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, dtype_name, is_host, mark, module
from hvdlite.engine import Lane
from hvdlite.process_sets import ProcessSet
from hvdlite.requests import Request, Signature


class Op(IntEnum):
    """Reduction operations, numbered as Horovod's."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = Op


def resolve_op(op: Op | int | None, average: bool | None) -> Op:
    """Horovod's two ways to say it: `op`, or the deprecated `average`; Average when neither is given."""
    if op is not None and average is not None:
        raise ValueError("give either op or average (deprecated), not both")
    if average is not None:
        warnings.warn("average= is deprecated: use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=4)
        return Average if average else Sum
    return Average if op is None else Op(op)


def reduction(op: Op, size: int, prescale: float = 1.0, postscale: float = 1.0) -> Reduction:
    """The arithmetic for an op over `size` ranks."""
    if op is Adasum:
        raise NotImplementedError("op=Adasum is not supported yet; use op=Average")
    operation = "sum" if op in (Average, Sum) else op.name.lower()
    return Reduction(operation, float(prescale), float(postscale), size if op is Average else 1)


def reduction_facts(op: Op, how: Reduction, array: Array) -> tuple[tuple[str, Any], ...]:
    """What ranks must agree on for a reduction of this array."""
    scaling = (("prescale_factor", how.before), ("postscale_factor", how.after))
    return (*array_facts(array), ("operation", op.name), *scaling)


def array_facts(array: Array, skip: int = 0) -> tuple[tuple[str, Any], ...]:
    """dtype, shape (from dimension `skip` on) and placement of an array."""
    what = "shape" if skip == 0 else "shape after the first dimension"
    device = "host" if is_host(array) else "device"
    return (("dtype", dtype_name(array.dtype)), (what, array.shape[skip:]), ("device", device))


def submit(kind: str, name: str | None, facts: Any, work: Callable[[Lane], Any], array: Array, wait: bool) -> Any:
    """Put a request on the eager lane; its result when `wait`, else its handle."""
    live = runtime.current()
    name = name if name is not None else f"noname.{live.serial('noname')}"
    request = Request(Signature(kind, name, facts), work, mark(array))
    return live.eager.run(request) if wait else live.eager.submit(request)


def allreduce_(
    array: Array, op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None, wait: bool = True,
) -> Any:
    """All-reduce in place. array: contiguous, same shape and dtype on every rank, of any dtype MPI or we can add.

    result = op over ranks of (array * prescale), * postscale, / size for Average. wait=False returns a Handle whose
    result is the array. Raises MismatchError on every rank when the ranks' arguments differ.
    """
    runtime.set_of(process_set)
    how = reduction(op, runtime.size(), prescale, postscale)
    flat = array.reshape(-1)

    def work(lane: Lane) -> Array:
        reduce_over_ranks(lane.transport, lane.workspace, lane.place, flat, how)
        return array

    return submit("allreduce", name, reduction_facts(op, how, array), work, array, wait)


def grouped_allreduce_(
    arrays: Sequence[Array], op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None, wait: bool = True,
) -> Any:
    """All-reduce several arrays in place as one operation. Result: the list of arrays."""
    runtime.set_of(process_set)
    if not arrays:
        raise ValueError("grouped_allreduce needs at least one tensor")
    how = reduction(op, runtime.size(), prescale, postscale)
    facts = tuple((f"{what} of tensor {i}", fact) for i, array in enumerate(arrays)
                  for what, fact in reduction_facts(op, how, array))

    def work(lane: Lane) -> list[Array]:
        for array in arrays:
            reduce_over_ranks(lane.transport, lane.workspace, lane.place, array.reshape(-1), how)
        return list(arrays)

    return submit("grouped_allreduce", name, facts, work, arrays[0], wait)


def broadcast_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None, wait: bool = True
) -> Any:
    """Overwrite every rank's array with root_rank's, in place. Same shape and dtype on every rank."""
    runtime.set_of(process_set)
    if not 0 <= root_rank < runtime.size():
        raise ValueError(f"broadcast: root_rank {root_rank} is not one of the ranks 0-{runtime.size() - 1}")

    def work(lane: Lane) -> Array:
        movement.broadcast(lane.transport, array.reshape(-1), root_rank)
        return array

    return submit("broadcast", name, (*array_facts(array), ("root rank", root_rank)), work, array, wait)


def allgather(array: Array, name: str | None = None, process_set: ProcessSet | None = None, wait: bool = True) -> Any:
    """All ranks' arrays, concatenated along the first dimension in rank order, on every rank.

    The first dimension may differ between ranks (0 is allowed); the others and the dtype must agree.
    """
    runtime.set_of(process_set)
    if array.ndim == 0:
        raise ValueError("allgather needs a tensor of at least one dimension; reshape the scalar to (1,)")

    def work(lane: Lane) -> Array:
        transport, xp = lane.transport, module(array)
        counts = [np.zeros(1, np.int64) for _ in range(transport.size)]
        counts[transport.rank][0] = array.shape[0]
        movement.allgather(transport, counts)
        bounds = np.cumsum([0, *(int(count[0]) for count in counts)])
        result = xp.empty((int(bounds[-1]), *array.shape[1:]), array.dtype)
        pieces = [result[start:stop] for start, stop in pairwise(bounds)]
        pieces[transport.rank][...] = array
        movement.allgather(transport, pieces)
        return result

    return submit("allgather", name, array_facts(array, skip=1), work, array, wait)


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank has called this."""
    runtime.set_of(process_set)
    live = runtime.current()
    # The roll call is the barrier.
    live.eager.run(Request(Signature("barrier", f"noname.{live.serial('noname')}"), lambda lane: None))
