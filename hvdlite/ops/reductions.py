"""Reductions: all-reduce, reduce to a root, reduce-scatter. Adasum is an operation like others here."""

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
    array: Array, op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[Array]:
    """All-reduce in place. array: contiguous, same shape and dtype on every rank, of any dtype MPI or we can add.

    result = op over ranks of (array * prescale), * postscale, / size for Average. Result: the
    array. Raises MismatchError on every rank when the ranks' arguments differ.
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
    arrays: Sequence[Array], op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None, or_none: bool = False,
) -> Operation[list[Array]]:
    """All-reduce several arrays in place as one operation, short ones together. Result: the list of arrays. Raises
    ValueError for arrays that share memory, and for none, unless `or_none`: then ranks agree that none gives any, and
    it is a MismatchError where some do."""
    if not arrays and not or_none:
        raise ValueError("grouped_allreduce needs at least one tensor")
    group = runtime.group_of(process_set)
    if shared := overlapping(arrays):
        raise ValueError(
            f"grouped_allreduce_: tensors {min(shared)} and {max(shared)} share memory, where each needs its own for "
            "its result: give each once, or use grouped_allreduce, which returns new ones"
        )
    how = reduction(op, group.size, prescale, postscale)
    for array in arrays:
        check(group, op, array)
    facts = grouped_facts(tuple(reduction_facts(op, how, array) for array in arrays))

    def work(at: Workplace) -> list[Array]:
        allreduce_all(at.transport, at.workspace, at.place, arrays, how)
        return list(arrays)

    first = arrays[0] if arrays else None
    return Operation(group, "grouped_allreduce", name, facts, work, first, lambda: Zeros.like(arrays, how))


def check(group: Group, op: Op, array: Array) -> None:
    """Raises ValueError for what cannot be averaged, NotImplementedError where Adasum is not defined."""
    if op == Average and array.dtype.kind == "b":
        raise ValueError("booleans have no average: use op=hvd.Max (any) or op=hvd.Min (all), or cast them first")
    if op == Adasum:
        require_adasum(group.size, group.size == runtime.size())


def require_adasum(size: int, everyone: bool) -> None:
    """Raises NotImplementedError where Adasum over so many ranks, all of the job's or not, is not defined."""
    if not everyone:
        raise NotImplementedError("op=Adasum is for the global process set only; use op=Average")
    if size & (size - 1):
        raise NotImplementedError(f"op=Adasum needs a power of two of ranks, not {size}; use op=Average")


@Collective
def reduce(
    array: Array, root_rank: int, op: Op = Average, name: str | None = None, prescale: float = 1.0,
    postscale: float = 1.0, process_set: ProcessSet | None = None,
) -> Operation[Array | None]:
    """Reduce to root_rank. Result: there the reduction, as a new array; None elsewhere. The array is left as it is.

    Arguments as for `allreduce_`; root_rank: a global rank. Raises NotImplementedError for Adasum.
    """
    group = runtime.group_of(process_set)
    root = root_of(group, "reduce", root_rank)
    check(group, op, array)
    if op == Adasum:
        raise NotImplementedError("reduce with op=Adasum: use allreduce")
    how = reduction(op, group.size, prescale, postscale)

    facts = (*reduction_facts(op, how, array), ("root rank", group.ranks[root]))
    return Operation(group, "reduce", name, facts, lambda at: whole_at(at, array, root, how), array)


def whole_at(at: Workplace, array: Array, root: int, how: Reduction) -> Array | None:
    """The reduction, at a root. Runs on the at."""
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
    """A new array with like's dtype of what was found in a wider one, and may have other rows."""
    result = at.workspace.new(like, found.shape[: like.ndim])
    widening.narrow(found, result)
    return result


@Collective
def reducescatter(
    array: Array, op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[Array]:
    """This rank's rows of the reduction of all ranks' arrays, as a new array; the array is left as it is.

    The rows are dealt out in rank order, as evenly as possible, the first ranks one more. Same shape and dtype on
    every rank. Only Average and Sum.
    """
    group, how = scatterable("reducescatter", [array], op, prescale, postscale, process_set)
    facts = reduction_facts(op, how, array)
    return Operation(group, "reducescatter", name, facts, lambda at: own_rows(at, array, how), array)


@Collective
def grouped_reducescatter(
    arrays: Sequence[Array], op: Op = Average, name: str | None = None, prescale: float = 1.0, postscale: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Operation[list[Array]]:
    """Reduce-scatter several arrays as one operation. Result: a list."""
    group, how = scatterable("grouped_reducescatter", arrays, op, prescale, postscale, process_set)
    facts = grouped_facts(tuple(reduction_facts(op, how, array) for array in arrays))

    def work(at: Workplace) -> list[Array]:
        return [own_rows(at, array, how) for array in arrays]

    return Operation(group, "grouped_reducescatter", name, facts, work, arrays[0])


def scatterable(
    kind: str, arrays: Sequence[Array], op: Op, prescale: float, postscale: float, process_set: ProcessSet | None
) -> tuple[Group, Reduction]:
    """The group and the arithmetic. Raises ValueError for tensors without rows, HvdliteError for other operations."""
    group = runtime.group_of(process_set)
    if not arrays or any(array.ndim == 0 for array in arrays):
        raise ValueError(f"{kind} needs tensors, of at least one dimension each")
    if op not in (Average, Sum):
        raise HvdliteError(f"{kind} with op={Op(op).name}: only Average and Sum are possible")
    for array in arrays:
        check(group, op, array)
    return group, reduction(op, group.size, prescale, postscale)


def amplification(op: Op, prescale: float, postscale: float, process_set: ProcessSet | None) -> float:
    """By how much the gradient of a reduce-scatter is larger than the gathered gradients."""
    return (runtime.group_of(process_set).size if op is Sum else 1) * prescale * postscale


def own_rows(at: Workplace, array: Array, how: Reduction) -> Array:
    """This rank's rows of the reduction. In memory, or a ring, n(p-1)/p elements sent per rank. Runs on the at."""
    if integers := wide.of_integers(how, array.dtype, at.transport.size):
        return narrowed(at, integers, own_rows(at, integers.widen(array), how.plain), array)
    rank, rows = at.transport.rank, even_rows(array.shape[0], at.transport.size)
    result = at.workspace.new(array, (rows[rank], *array.shape[1:]))
    nbytes, most = (array.nbytes if is_host(array) else 0), through_memory.MOST_SCATTERED_BYTES
    if memory := through_memory.memory_for(nbytes, at.transport, at.workspace, at.place, most):
        parts = [block.reshape(-1) for block in split_rows(array, rows)]
        through_memory.reduce_scatter(at.transport, memory, parts, result.reshape(-1), how)
        return result
    if is_small_float(array.dtype):
        add_up_rows(at, array, rows, result, how)
        return result
    buffer = array.copy()
    how.prescale(buffer.reshape(-1))
    blocks = split_rows(buffer, rows)
    flat = [block.reshape(-1) for block in (blocks[-1], *blocks[:-1])]  # the ring leaves piece r+1 to rank r
    scratch = at.workspace.scratch(buffer, scratch_length(max(map(len, flat)), buffer))
    prepared_reduce_scatter(at.transport, flat, scratch, how)()
    how.postscale(blocks[rank].reshape(-1))
    result[...] = blocks[rank]
    return result


def add_up_rows(at: Workplace, array: Array, rows: Sequence[int], result: Array, how: Reduction) -> None:
    """The same for 16-bit floats, by messages."""
    pieces = [block.reshape(-1) for block in split_rows(array, rows)]
    mine = result.reshape(-1)
    mine[...] = pieces[at.transport.rank]
    pieces[at.transport.rank] = mine
    scratch = at.workspace.scratch(array, scratch_length(max(map(len, pieces)), array))
    direct.prepared_reduce_scatter(at.transport, pieces, scratch, how)()
