"""Reductions: all-reduce, reduce to a root, and reduce-scatter, for every `Op`."""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.algorithms import allreduce as reduce_over_ranks
from hvdlite.algorithms import direct, through_memory, wide
from hvdlite.algorithms.grouped import allreduce_all
from hvdlite.algorithms.pipeline import chunk_length, scratch_length
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import prepared_reduce_scatter
from hvdlite.algorithms.tree import only_sends, reduce_to_root
from hvdlite.arrays import Array, is_host, is_small_float, overlapping, split_rows
from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.common import (
    Adasum,
    Average,
    Collective,
    Op,
    Operation,
    Sum,
    even_rows,
    grouped_facts,
    reduction,
    reduction_facts,
    root_of,
)
from hvdlite.ops.stand_in import Zeros


@Collective
def allreduce_(
    array: Array,
    op: Op = Average,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[Array]:
    """All-reduce an array in place. The result is the array.

    Args:
        array: Contiguous, of the same shape and dtype on every rank.
        op: The reduction. Average divides by the number of ranks.
        name: Calls of the ranks are matched by it. None: by their order.
        prescale: Each rank's values are multiplied by it before the reduction.
        postscale: The result is multiplied by it.
        process_set: The ranks that take part. None: all.

    Raises:
        ValueError: Booleans have no average.
        NotImplementedError: Adasum is not defined for these ranks.
    """
    group = runtime.group_of(process_set)
    how = reduction(op, group.size, prescale, postscale)
    check(group, op, array)
    flat = array.reshape(-1)

    def work(at: Workplace) -> Array:
        reduce_over_ranks(at.transport, at.workspace, at.place, flat, how)
        return array

    facts = reduction_facts(op, how, array)
    return Operation(group, "allreduce", name, facts, work, array, lambda: Zeros.like([flat], how))


@Collective
def grouped_allreduce_(
    arrays: Sequence[Array],
    op: Op = Average,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[list[Array]]:
    """All-reduce several arrays in place as one operation, short arrays together. The result is a list of the arrays.

    Args:
        arrays: At least one, equally many on every rank, otherwise as for `allreduce_`. They share no memory.
        op: As for `allreduce_`.
        name: As for `allreduce_`.
        prescale: As for `allreduce_`.
        postscale: As for `allreduce_`.
        process_set: As for `allreduce_`.

    Raises:
        ValueError: There is no array, or two share memory, or booleans are to be averaged.
        NotImplementedError: Adasum is not defined for these ranks.
    """
    return grouped(runtime.group_of(process_set), arrays, op, name, prescale, postscale)


def grouped(
    group: Group, arrays: Sequence[Array], op: Op, name: str | None, prescale: float = 1.0, postscale: float = 1.0
) -> Operation[list[Array]]:
    """Return the operation of `grouped_allreduce_` for a group. Raises ValueError as that does."""
    if not arrays:
        raise ValueError("grouped_allreduce needs at least one tensor")
    if shared := overlapping(arrays):
        raise ValueError(
            f"grouped_allreduce_: tensors {min(shared)} and {max(shared)} share memory, but each needs memory "
            "for its result: give each tensor once, or use grouped_allreduce, which returns new tensors"
        )
    how = reduction(op, group.size, prescale, postscale)
    for array in arrays:
        check(group, op, array)
    facts = grouped_facts(tuple(reduction_facts(op, how, array) for array in arrays))

    def work(at: Workplace) -> list[Array]:
        allreduce_all(at.transport, at.workspace, at.place, arrays, how)
        return list(arrays)

    return Operation(group, "grouped_allreduce", name, facts, work, arrays[0], lambda: Zeros.like(arrays, how))


@Collective
def grouped_allreduce_of_none(name: str | None = None) -> Operation[None]:
    """Take part in a `grouped_allreduce_` to which no rank gives arrays. If other ranks do, all raise MismatchError."""
    group = runtime.group_of(None)
    nothing = Zeros.like((), reduction(Sum, group.size))
    return Operation(group, "grouped_allreduce", name, grouped_facts(()), lambda at: None, None, lambda: nothing)


def check(group: Group, op: Op, array: Array) -> None:
    """Raise ValueError for an average of booleans, and NotImplementedError if Adasum is not defined for these ranks."""
    if op == Average and array.dtype.kind == "b":
        raise ValueError("booleans have no average: use op=hvd.Max (any) or op=hvd.Min (all), or cast them first")
    if op == Adasum:
        require_adasum(group.size, group.size == runtime.size())


def require_adasum(size: int, everyone: bool) -> None:
    """Raise NotImplementedError if Adasum is not defined for these ranks.

    Args:
        size: The number of ranks.
        everyone: Whether these are all ranks of the job.
    """
    if not everyone:
        raise NotImplementedError("op=Adasum is for the global process set only; use op=Average")
    if size & (size - 1):
        raise NotImplementedError(f"op=Adasum needs a power of two of ranks, not {size}; use op=Average")


@Collective
def reduce(
    array: Array,
    root_rank: int,
    op: Op = Average,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[Array | None]:
    """Reduce to one rank. The result is a new array there, and None on other ranks. `array` keeps its values.

    Args:
        array: As for `allreduce_`.
        root_rank: A global rank, which gets the result.
        op: As for `allreduce_`.
        name: As for `allreduce_`.
        prescale: As for `allreduce_`.
        postscale: As for `allreduce_`.
        process_set: As for `allreduce_`.

    Raises:
        ValueError: `root_rank` is no member, or booleans are to be averaged.
        NotImplementedError: `op` is Adasum.
    """
    group = runtime.group_of(process_set)
    root = root_of(group, "reduce", root_rank)
    check(group, op, array)
    if op == Adasum:
        raise NotImplementedError("reduce with op=Adasum is not possible: use allreduce")
    how = reduction(op, group.size, prescale, postscale)
    facts = (*reduction_facts(op, how, array), ("root rank", group.ranks[root]))
    return Operation(group, "reduce", name, facts, lambda at: whole_at(at, array, root, how), array)


def whole_at(at: Workplace, array: Array, root: int, how: Reduction) -> Array | None:
    """Reduce to a root, which gets a new array. Runs on the lane."""
    if widening := wide.widening(how, array.dtype, at.transport.size):
        found = whole_at(at, widening.widen(array), root, how.plain)
        return None if found is None else narrowed(at, widening, found, array)
    flat = buffer = array.reshape(-1)
    sends = only_sends(at.transport, root)
    if how.before != 1.0 or not sends:
        buffer = at.workspace.new(flat, flat.shape)
        buffer[...] = flat
    scratch = at.workspace.scratch(buffer, 0 if sends else chunk_length(buffer.size, buffer))
    reduce_to_root(at.transport, buffer, scratch, root, how)
    return buffer.reshape(array.shape) if at.transport.rank == root else None


def narrowed(at: Workplace, widening: wide.Widening, found: Array, like: Array) -> Array:
    """Return a result of a wider dtype as a new array of the dtype of `like`. Its number of rows may be another."""
    result = at.workspace.new(like, found.shape[: like.ndim])
    widening.narrow(found, result)
    return result


@Collective
def reducescatter(
    array: Array,
    op: Op = Average,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[Array]:
    """Reduce all ranks' arrays and divide the rows among the ranks. The result, this rank's rows, is a new array.

    The rows are divided in rank order, as evenly as possible; the first ranks get one more.

    Args:
        array: Of at least one dimension, otherwise as for `allreduce_`. It keeps its values.
        op: Average or Sum.
        name: As for `allreduce_`.
        prescale: As for `allreduce_`.
        postscale: As for `allreduce_`.
        process_set: As for `allreduce_`.

    Raises:
        ValueError: The array is a scalar, or booleans are to be averaged.
        HvdliteError: `op` is neither Average nor Sum.
    """
    group, how = scatterable("reducescatter", [array], op, prescale, postscale, process_set)
    facts = reduction_facts(op, how, array)
    return Operation(group, "reducescatter", name, facts, lambda at: own_rows(at, array, how), array)


@Collective
def grouped_reducescatter(
    arrays: Sequence[Array],
    op: Op = Average,
    name: str | None = None,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[list[Array]]:
    """Reduce-scatter several arrays as one operation. Otherwise as `reducescatter`."""
    group, how = scatterable("grouped_reducescatter", arrays, op, prescale, postscale, process_set)
    facts = grouped_facts(tuple(reduction_facts(op, how, array) for array in arrays))

    def work(at: Workplace) -> list[Array]:
        return [own_rows(at, array, how) for array in arrays]

    return Operation(group, "grouped_reducescatter", name, facts, work, arrays[0])


def scatterable(
    kind: str, arrays: Sequence[Array], op: Op, prescale: float, postscale: float, process_set: ProcessSet | None
) -> tuple[Group, Reduction]:
    """Return the group and the arithmetic of a reduce-scatter. Raises what `reducescatter` raises."""
    group = runtime.group_of(process_set)
    if not arrays or any(array.ndim == 0 for array in arrays):
        raise ValueError(f"{kind} needs tensors, of at least one dimension each")
    if op not in (Average, Sum):
        raise HvdliteError(f"{kind} with op={Op(op).name}: only Average and Sum are possible")
    for array in arrays:
        check(group, op, array)
    return group, reduction(op, group.size, prescale, postscale)


def amplification(op: Op, prescale: float, postscale: float, process_set: ProcessSet | None) -> float:
    """Return the factor by which the gradient of a reduce-scatter is larger than the gathered gradients."""
    return (runtime.group_of(process_set).size if op is Sum else 1) * prescale * postscale


def own_rows(at: Workplace, array: Array, how: Reduction) -> Array:
    """Return this rank's rows of the reduction. Runs on the lane."""
    rows = even_rows(array.shape[0], at.transport.size)
    result = at.workspace.new(array, (rows[at.transport.rank], *array.shape[1:]))
    reduce_scatter(at, [block.reshape(-1) for block in split_rows(array, rows)], result.reshape(-1), how)
    return result


def reduce_scatter(at: Workplace, parts: Sequence[Array], result: Array, how: Reduction) -> None:
    """Write the reduction of all ranks' parts for this rank into `result`. Runs on the lane.

    Ranks add in shared memory, or send each other n(p-1)/p elements in a ring.

    Args:
        at: The workplace.
        parts: A flat array for each rank, equally long on all ranks; not changed.
        result: As long as this rank's part. It may be that part.
        how: The operation and its scaling.
    """
    rank, size = at.transport.rank, at.transport.size
    if integers := wide.of_integers(how, result.dtype, size):
        widened = integers.widen(result)  # of the right shape
        reduce_scatter(at, [integers.widen(part).reshape(-1) for part in parts], widened.reshape(-1), how.plain)
        integers.narrow(widened, result)
        return
    nbytes = sum(part.nbytes for part in parts if is_host(part))
    if memory := through_memory.memory_for(nbytes, at.transport, at.workspace, at.place):
        through_memory.reduce_scatter(at.transport, memory, parts, result, how)
        return
    scratch = at.workspace.scratch(result, scratch_length(max(map(len, parts)), result))
    if is_small_float(result.dtype):
        result[...] = parts[rank]
        pieces = [*parts[:rank], result, *parts[rank + 1 :]]
        direct.prepared_reduce_scatter(at.transport, pieces, scratch, how)()
        return
    copies = [part.copy() for part in parts]  # partial sums
    for copy in copies:
        how.prescale(copy)
    prepared_reduce_scatter(at.transport, [copies[-1], *copies[:-1]], scratch, how)()  # leaves piece r+1 to rank r
    how.postscale(copies[rank])
    result[...] = copies[rank]
