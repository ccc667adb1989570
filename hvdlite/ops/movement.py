"""Moving arrays without arithmetic: broadcast, all-gather, all-to-all, gather, scatter; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType
from typing import Any

import numpy as np

from hvdlite.algorithms import label, movement, through_memory
from hvdlite.arrays import Array, DType, is_host, split_rows
from hvdlite.errors import ScalarError
from hvdlite.gpu_streams import on_host
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.signature import Facts, digest
from hvdlite.lanes.workplace import Workplace
from hvdlite.ops.common import Collective, Operation, array_facts, even_rows, grouped_facts, root_of
from hvdlite.ops.stand_in import StandIn
from hvdlite.transports import Transport


@Collective
def broadcast_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[Array]:
    """Overwrite every rank's array with root_rank's (a global rank), in place. Same shape and dtype on every rank."""
    group = runtime.group_of(process_set)
    root = root_of(group, "broadcast", root_rank)

    def work(at: Workplace) -> Array:
        movement.broadcast(at.transport, array.reshape(-1), root, at.place.hosts)
        return array

    return Operation(group, "broadcast", name, (*array_facts(array), ("root rank", group.ranks[root])), work, array)


@Collective
def broadcast_several_(
    arrays: Sequence[Array], root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[None]:
    """Overwrite every rank's flat arrays on the host with root_rank's, in place, as one operation. As many, of the same
    lengths and dtypes, on every rank. Waits for all."""
    group = runtime.group_of(process_set)
    root = root_of(group, "broadcast", root_rank)

    def work(at: Workplace) -> None:
        for array in arrays:
            movement.broadcast(at.transport, array, root, at.place.hosts)

    return Operation(group, "broadcast", name, (("root rank", group.ranks[root]),), work, arrays[0])


@Collective
def allgather(
    array: Array, name: str | None = None, process_set: ProcessSet | None = None,
    addends: bool = False, facts: Facts = (),
) -> Operation[Array]:
    """All ranks' arrays, concatenated along the first dimension in rank order, on every rank.

    The first dimension may differ between ranks (0 is allowed); the others and the dtype must agree. Raises
    ScalarError where all ranks gave scalars. addends: what is gathered will be added up, so that ranks that have
    joined may be left out; otherwise they are an error. facts: what else ranks must agree on.
    """
    group = runtime.group_of(process_set)
    facts, count = (*array_facts(array, skip=1), *facts), count_of([array])
    stand_in = (lambda: NoRows(not is_host(array), array.shape[1:], array.dtype)) if addends else None

    def work(at: Workplace) -> Array:
        return gathered(at, array)

    return Operation(group, "allgather", name, facts, work, array, stand_in, count)


@dataclass(frozen=True)
class NoRows(StandIn):
    """An all-gather to which nothing is given."""

    shape: tuple[int, ...]
    dtype: DType

    def take_part(self, at: Any, xp: ModuleType) -> Array:
        return gathered(at, xp.empty((0, *self.shape), self.dtype))


@Collective
def grouped_allgather(
    arrays: Sequence[Array], name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[list[Array]]:
    """All-gather several arrays as one operation. Result: the list of what they become. Raises ValueError for none."""
    group = runtime.group_of(process_set)
    if not arrays:
        raise ValueError("grouped_allgather needs at least one tensor")
    facts = grouped_facts(tuple(array_facts(array, skip=1) for array in arrays))

    def work(at: Workplace) -> list[Array]:
        return [gathered(at, array) for array in arrays]

    return Operation(group, "grouped_allgather", name, facts, work, arrays[0], count=count_of(arrays))


def count_of(arrays: Sequence[Array]) -> int:
    """A number that is the same on two ranks when all their arrays have as many rows."""
    rows = [array.shape[0] if array.ndim else 0 for array in arrays]
    return int(rows[0]) if len(rows) == 1 else digest(str(rows))


def gathered(at: Workplace, array: Array) -> Array:
    """All ranks' arrays, concatenated. Runs on the lane."""
    transport = at.transport
    rows = rows_of_all(at, array)
    result = at.workspace.new(array, (sum(rows), *array.shape[1:]))
    pieces = split_rows(result, rows)
    pieces[transport.rank][...] = array
    fill(at, pieces)
    return result


def fill(at: Workplace, pieces: Sequence[Array]) -> None:
    """Every rank's piece, on all; this rank's own is filled already. Runs on the at."""
    longest = max(piece.nbytes for piece in pieces) if is_host(pieces[0]) else 0
    if memory := through_memory.memory_for(longest, at.transport, at.workspace, at.place):
        through_memory.allgather(at.transport, memory, pieces)
    else:
        movement.allgather(at.transport, pieces)


@Collective
def allgather_several(
    mine: Sequence[Array], lengths: Sequence[Sequence[int]], name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Operation[list[list[Array]]]:
    """Every rank's arrays of bytes, in rank order, each in new memory of its own. Waits for all.

    mine: flat, on the host, any number. lengths: those of each rank's arrays, the same on every rank; not all empty.
    """
    group = runtime.group_of(process_set)
    nothing: Array = np.empty(0, np.uint8)

    def work(at: Workplace) -> list[list[Array]]:
        found: list[list[Array]] = [[np.empty(length, np.uint8) for length in theirs] for theirs in lengths]
        for target, array in zip(found[at.transport.rank], mine, strict=True):
            target[...] = array
        for pieces in zip_longest(*found, fillvalue=nothing):
            fill(at, pieces)
        return found

    return Operation(group, "allgather", name, (), work, nothing)


def rows_of_all(at: Workplace, array: Array) -> list[int]:
    """Every rank's number of rows. No message where all have said the same with the roll call.

    Raises ScalarError where the arrays, which have as many dimensions everywhere, have none.
    """
    if array.ndim == 0:
        raise ScalarError("scalars cannot be gathered: give tensors of at least one dimension (reshape to (1,))")
    if at.equal_counts:
        return [array.shape[0]] * at.transport.size
    counts = np.full((at.transport.size, 1), array.shape[0], np.int64)
    movement.allgather(at.transport, list(counts))
    return [count for (count,) in counts.tolist()]


@Collective
def alltoall(
    array: Array, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[tuple[Array, Array]]:
    """Send the first splits[0] rows to rank 0, the next splits[1] to rank 1, and so on. Result: what all ranks sent
    here, in rank order, and how many rows each did (int32).

    splits: one whole number per rank of the set, a sum of at most the number of rows; None: equal parts. The other
    dimensions and the dtype must agree. Raises ValueError for splits that do not fit.
    """
    group = runtime.group_of(process_set)
    rows = rows_to_send("alltoall", group, array, splits, even=True)

    def work(at: Workplace) -> tuple[Array, Array]:
        transport = at.transport
        received = rows if at.equal_counts else rows_to_receive(transport, rows)
        result = at.workspace.new(array, (sum(received), *array.shape[1:]))
        movement.alltoall(transport, split_rows(array, rows), split_rows(result, received))
        return result, np.array(received, np.int32 if max(received, default=0) < 1 << 31 else np.int64)

    equal = all(count == rows[0] for count in rows)
    count = rows[0] if equal else -1 - group.rank  # which is no other rank's
    return Operation(group, "alltoall", name, array_facts(array, skip=1), work, array, count=count)


def rows_to_receive(transport: Transport, rows: Sequence[int]) -> list[int]:
    """How many rows each rank sends here. rows: how many go to each."""
    told, heard = np.array(rows, np.int64), np.empty(len(rows), np.int64)
    movement.alltoall(transport, list(told.reshape(-1, 1)), list(heard.reshape(-1, 1)))
    return [int(count) for count in heard]


def rows_to_send(kind: str, group: Group, array: Array, splits: Any, even: bool) -> list[int]:
    """The number of rows for each rank. even: without splits, all must get the same number.

    Raises ValueError where they do not fit the array or the ranks."""
    size = group.size
    if array.ndim == 0:
        raise ValueError(f"{kind} needs a tensor of at least one dimension; reshape the scalar to (1,)")
    if splits is None:
        each, more = divmod(array.shape[0], size)
        if even and more:
            raise ValueError(f"{kind}: {array.shape[0]} rows are not divisible among {size} ranks: give splits")
        return [each] * size if even else even_rows(array.shape[0], size)
    given = np.asarray(splits)
    if given.ndim != 1 or given.dtype.kind not in "iu" or given.size != size or (given < 0).any():
        raise ValueError(f"{kind}: splits must be {size} whole numbers, one per rank, not {splits}")
    rows = [int(count) for count in given]  # whose sum does not wrap
    if sum(rows) > array.shape[0]:
        raise ValueError(f"{kind}: splits add up to {sum(rows)}, but there are {array.shape[0]} rows")
    return rows


@Collective
def gather(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[Array | None]:
    """All ranks' arrays, concatenated along the first dimension in rank order, at root_rank; None elsewhere.

    The first dimension may differ between ranks; the others and the dtype must agree. root_rank: a global rank.
    """
    group = runtime.group_of(process_set)
    root = root_of(group, "gather", root_rank)

    def work(at: Workplace) -> Array | None:
        rows = rows_of_all(at, array)
        if at.transport.rank != root:
            at.transport.send(array, root)
            return None
        result = at.workspace.new(array, (sum(rows), *array.shape[1:]))
        movement.gather(at.transport, array, split_rows(result, rows))
        return result

    facts = (*array_facts(array, skip=1), ("root rank", group.ranks[root]))
    return Operation(group, "gather", name, facts, work, array, count=count_of([array]))


@Collective
def scatter(
    array: Array | None, root_rank: int, splits: Any = None, name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Operation[Array]:
    """This rank's rows of root_rank's array: the first splits[0] rows go to rank 0, and so on.

    array, splits: the root's count, the others' are ignored and may be None. Without splits the rows are dealt out
    as evenly as possible, the first ranks one more. The result lies on the host. Raises ValueError at the root for
    splits that do not fit.
    """
    group = runtime.group_of(process_set)
    root = root_of(group, "scatter", root_rank)
    facts = (("root rank", group.ranks[root]),)
    if group.rank != root:
        return Operation(group, "scatter", name, facts, lambda at: label.receive(at.transport, root)[0], None)
    if array is None:
        raise ValueError("scatter: the root must give a tensor")
    array = on_host(array)  # the others cannot know that it lay on a GPU
    blocks = split_rows(array, rows_to_send("scatter", group, array, splits, even=False))
    labels = [label.encode(block.shape, block.dtype) for block in blocks]

    def work(at: Workplace) -> Array:
        movement.scatter(at.transport, labels)
        movement.scatter(at.transport, blocks)
        return blocks[root].copy()

    return Operation(group, "scatter", name, facts, work, array)


@Collective
def barrier(process_set: ProcessSet | None = None) -> Operation[None]:
    """Wait until every member of the process set has called this."""
    group = runtime.group_of(process_set)
    return Operation(group, "barrier", None, (), lambda at: None, None)
