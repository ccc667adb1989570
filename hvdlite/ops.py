"""Collectives on NumPy or CuPy arrays: each builds a request for the eager lane of its process set.

Asynchronous first: a function ending in `_async` returns a `Handle`; its plain twin waits. Arrays are contiguous;
adapters turn a framework's tensors into arrays that share their memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from hvdlite import runtime
from hvdlite.algorithms import allreduce as reduce_over_ranks
from hvdlite.algorithms import movement
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import reduce_scatter
from hvdlite.arrays import Array, dtype_name, is_host, mark, module
from hvdlite.engine import Lane
from hvdlite.errors import HvdliteError
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


def grouped_facts(facts: Sequence[Sequence[tuple[str, Any]]]) -> tuple[tuple[str, Any], ...]:
    """The facts of several arrays as those of one operation; of a single one as they are."""
    if len(facts) == 1:
        return tuple(facts[0])
    return tuple((f"{what} of tensor {i}", fact) for i, each in enumerate(facts) for what, fact in each)


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
    facts = grouped_facts([reduction_facts(op, how, array) for array in arrays])

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

    return submit("allgather", name, array_facts(array, skip=1), lambda lane: gathered(lane, array), array, wait)


def grouped_allgather(
    arrays: Sequence[Array], name: str | None = None, process_set: ProcessSet | None = None, wait: bool = True
) -> Any:
    """All-gather several arrays as one operation. Result: the list of what they become."""
    runtime.set_of(process_set)
    if not arrays or any(array.ndim == 0 for array in arrays):
        raise ValueError("grouped_allgather needs tensors, of at least one dimension each")
    facts = grouped_facts([array_facts(array, skip=1) for array in arrays])
    return submit("grouped_allgather", name, facts, lambda lane: [gathered(lane, a) for a in arrays], arrays[0], wait)


def gathered(lane: Lane, array: Array) -> Array:
    """All ranks' arrays, concatenated. Runs on the lane."""
    transport = lane.transport
    counts = [np.zeros(1, np.int64) for _ in range(transport.size)]
    counts[transport.rank][0] = array.shape[0]
    movement.allgather(transport, counts)
    rows = [int(count[0]) for count in counts]
    result = module(array).empty((sum(rows), *array.shape[1:]), array.dtype)
    pieces = split_rows(result, rows)
    pieces[transport.rank][...] = array
    movement.allgather(transport, pieces)
    return result


def alltoall(
    array: Array, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None, wait: bool = True
) -> Any:
    """Send the first splits[0] rows to rank 0, the next splits[1] to rank 1, and so on. Result: what all ranks sent
    here, in rank order, and how many rows each did (int32).

    splits: one whole number per rank, a sum of at most the number of rows; None: equal parts. The other dimensions
    and the dtype must agree. Raises ValueError for splits that do not fit.
    """
    runtime.set_of(process_set)
    rows = rows_to_send(array, splits)

    def work(lane: Lane) -> tuple[Array, Array]:
        transport = lane.transport
        counts = [np.zeros(1, np.int64) for _ in range(transport.size)]
        movement.alltoall(transport, [np.array([count], np.int64) for count in rows], counts)
        received = [int(count[0]) for count in counts]
        result = module(array).empty((sum(received), *array.shape[1:]), array.dtype)
        movement.alltoall(transport, split_rows(array, rows), split_rows(result, received))
        return result, np.array(received, np.int32)

    return submit("alltoall", name, array_facts(array, skip=1), work, array, wait)


def rows_to_send(array: Array, splits: Any) -> list[int]:
    """The number of rows for each rank. Raises ValueError where they do not fit the array or the ranks."""
    size = runtime.size()
    if array.ndim == 0:
        raise ValueError("alltoall needs a tensor of at least one dimension")
    if splits is None:
        if array.shape[0] % size:
            raise ValueError(f"alltoall: {array.shape[0]} rows are not divisible among {size} ranks: give splits")
        return [array.shape[0] // size] * size
    given = np.asarray(splits)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.size != size or (given < 0).any():
        raise ValueError(f"alltoall: splits must be {size} whole numbers, one per rank, not {splits}")
    if given.sum() > array.shape[0]:
        raise ValueError(f"alltoall: splits add up to {given.sum()}, but there are {array.shape[0]} rows")
    return [int(count) for count in given]


def split_rows(array: Array, rows: Sequence[int]) -> list[Array]:
    """Views of the array's first rows[0] rows, the next rows[1], ..."""
    return [array[start:stop] for start, stop in pairwise([0, *accumulate(rows)])]


def reducescatter(
    array: Array, op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None, wait: bool = True,
) -> Any:
    """This rank's rows of the reduction of all ranks' arrays, as a new array; the array is left as it is.

    The rows are dealt out in rank order, as evenly as possible, the first ranks one more. Same shape and dtype on
    every rank. Only Average and Sum.
    """
    how = scatterable("reducescatter", [array], op, prescale, postscale, process_set)
    facts = reduction_facts(op, how, array)
    return submit("reducescatter", name, facts, lambda lane: own_rows(lane, array, how), array, wait)


def grouped_reducescatter(
    arrays: Sequence[Array], op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None, wait: bool = True,
) -> Any:
    """Reduce-scatter several arrays as one operation. Result: a list."""
    how = scatterable("grouped_reducescatter", arrays, op, prescale, postscale, process_set)
    facts = grouped_facts([reduction_facts(op, how, array) for array in arrays])

    def work(lane: Lane) -> list[Array]:
        return [own_rows(lane, array, how) for array in arrays]

    return submit("grouped_reducescatter", name, facts, work, arrays[0], wait)


def scatterable(
    kind: str, arrays: Sequence[Array], op: Op, prescale: float, postscale: float, process_set: ProcessSet | None
) -> Reduction:
    """The arithmetic. Raises ValueError for tensors without rows, HvdliteError for other operations."""
    runtime.set_of(process_set)
    if not arrays or any(array.ndim == 0 for array in arrays):
        raise ValueError(f"{kind} needs tensors, of at least one dimension each")
    if op not in (Average, Sum):
        raise HvdliteError(f"{kind} with op={op.name}: only Average and Sum are possible")
    return reduction(op, runtime.size(), prescale, postscale)


def own_rows(lane: Lane, array: Array, how: Reduction) -> Array:
    """This rank's rows of the reduction. Ring, n(p-1)/p elements sent per rank. Runs on the lane."""
    rank, size = lane.transport.rank, lane.transport.size
    each, more = divmod(array.shape[0], size)
    buffer = array.copy()
    how.prescale(buffer)
    blocks = split_rows(buffer, [each + (other < more) for other in range(size)])
    flat = [block.reshape(-1) for block in (blocks[-1], *blocks[:-1])]  # the ring leaves piece r+1 to rank r
    reduce_scatter(lane.transport, flat, lane.workspace.scratch(buffer, max(map(len, flat))), how)
    how.postscale(blocks[rank])
    return blocks[rank].copy()


def barrier(process_set: ProcessSet | None = None) -> None:
    """Wait until every rank has called this."""
    runtime.set_of(process_set)
    live = runtime.current()
    # The roll call is the barrier.
    live.eager.run(Request(Signature("barrier", f"noname.{live.serial('noname')}"), lambda lane: None))
