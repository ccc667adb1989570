"""Moving arrays without arithmetic: broadcast, all-gather, all-to-all, gather, scatter; and the barrier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import ModuleType

import numpy as np

from hvdlite.algorithms import label, movement
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
    """Overwrite every rank's array with root_rank's, in place.

    Args:
        array: Contiguous, of the same shape and dtype on every rank.
        root_rank: A global rank.
        name: Calls of the ranks are matched by it. None: by their order.
        process_set: The ranks that take part. None: all.

    Raises:
        ValueError: `root_rank` is no member.
    """
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
    """Overwrite every rank's arrays with root_rank's, in place, as one operation.

    Args:
        arrays: Flat and on the host. The ranks know that their numbers, lengths and dtypes agree.
        root_rank: A global rank.
        name: As for `broadcast_`.
        process_set: As for `broadcast_`.
    """
    group = runtime.group_of(process_set)
    root = root_of(group, "broadcast", root_rank)

    def work(at: Workplace) -> None:
        for array in arrays:
            movement.broadcast(at.transport, array, root, at.place.hosts)

    return Operation(group, "broadcast", name, (("root rank", group.ranks[root]),), work, arrays[0])


@Collective
def allgather(
    array: Array,
    name: str | None = None,
    process_set: ProcessSet | None = None,
    addends: bool = False,
    facts: Facts = (),
) -> Operation[Array]:
    """Concatenate all ranks' arrays along the first dimension, in rank order. Every rank gets the result.

    Args:
        array: Its first dimension may differ between ranks, and may be 0. Other dimensions and the dtype must agree.
        name: As for `broadcast_`.
        process_set: As for `broadcast_`.
        addends: Whether the rows will be added up, so that ranks that have joined may give none. Otherwise a rank that
            has joined makes the call an error.
        facts: What else ranks must agree on.

    Raises:
        ScalarError: All ranks gave scalars.
    """
    group = runtime.group_of(process_set)
    facts, count = (*array_facts(array, skip=1), *facts), count_of([array])
    stand_in = (lambda: NoRows(not is_host(array), array.shape[1:], array.dtype)) if addends else None

    def work(at: Workplace) -> Array:
        return gathered(at, array)

    return Operation(group, "allgather", name, facts, work, array, stand_in, count)


@dataclass(frozen=True)
class NoRows(StandIn):
    """An all-gather to which this rank gives no rows."""

    shape: tuple[int, ...]
    dtype: DType

    def take_part(self, at: Workplace, xp: ModuleType) -> Array:
        """Gather with no rows of this rank's."""
        return gathered(at, xp.empty((0, *self.shape), self.dtype))


@Collective
def grouped_allgather(
    arrays: Sequence[Array], name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[list[Array]]:
    """All-gather several arrays as one operation. Raises ValueError if `arrays` is empty."""
    group = runtime.group_of(process_set)
    if not arrays:
        raise ValueError("grouped_allgather needs at least one tensor")
    facts = grouped_facts(tuple(array_facts(array, skip=1) for array in arrays))

    def work(at: Workplace) -> list[Array]:
        return [gathered(at, array) for array in arrays]

    return Operation(group, "grouped_allgather", name, facts, work, arrays[0], count=count_of(arrays))


def count_of(arrays: Sequence[Array]) -> int:
    """Return a number that two ranks have in common if each of their arrays has equally many rows."""
    rows = [array.shape[0] if array.ndim else 0 for array in arrays]
    return int(rows[0]) if len(rows) == 1 else digest(str(rows))


def gathered(at: Workplace, array: Array) -> Array:
    """Concatenate all ranks' arrays. Runs on the lane."""
    transport = at.transport
    rows = rows_of_all(at, array)
    result = at.workspace.new(array, (sum(rows), *array.shape[1:]))
    pieces = split_rows(result, rows)
    pieces[transport.rank][...] = array
    movement.allgather(at.transport, pieces)
    return result


@Collective
def allgather_several(
    mine: Sequence[Array],
    lengths: Sequence[Sequence[int]],
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Operation[list[list[Array]]]:
    """Give every rank all ranks' arrays of bytes. The result has one list per rank, of new arrays.

    Args:
        mine: This rank's arrays: flat and on the host, any number of them.
        lengths: Each rank's lengths in bytes, equal on every rank. At least one rank has an array.
        name: As for `broadcast_`.
        process_set: As for `broadcast_`.
    """
    group = runtime.group_of(process_set)
    nothing: Array = np.empty(0, np.uint8)

    def work(at: Workplace) -> list[list[Array]]:
        found: list[list[Array]] = [[np.empty(length, np.uint8) for length in theirs] for theirs in lengths]
        for target, array in zip(found[at.transport.rank], mine, strict=True):
            target[...] = array
        for pieces in zip_longest(*found, fillvalue=nothing):
            movement.allgather(at.transport, pieces)
        return found

    return Operation(group, "allgather", name, (), work, nothing)


def rows_of_all(at: Workplace, array: Array) -> list[int]:
    """Return every rank's number of rows. Sends no message if the roll call has shown that all numbers are equal.

    Raises:
        ScalarError: The arrays, which have equally many dimensions on all ranks, have none.
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
    array: Array, splits: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[tuple[Array, Array]]:
    """Send the first splits[0] rows to rank 0, the next splits[1] rows to rank 1, and so on.

    The result has the rows that all ranks sent here, in rank order, and how many rows each rank sent (int32).

    Args:
        array: Its first dimension may differ between ranks. Other dimensions and the dtype must agree.
        splits: One whole number per rank. Their sum is at most the number of rows. None: equal parts.
        name: As for `broadcast_`.
        process_set: As for `broadcast_`.

    Raises:
        ValueError: The splits do not fit.
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
    count = rows[0] if equal else -1 - group.rank  # another number on each rank
    return Operation(group, "alltoall", name, array_facts(array, skip=1), work, array, count=count)


def rows_to_receive(transport: Transport, rows: Sequence[int]) -> list[int]:
    """Return how many rows each rank sends here, given how many rows this rank sends to each."""
    sent, received = np.array(rows, np.int64), np.empty(len(rows), np.int64)
    movement.alltoall(transport, list(sent.reshape(-1, 1)), list(received.reshape(-1, 1)))
    return [int(count) for count in received]


def rows_to_send(kind: str, group: Group, array: Array, splits: object, even: bool) -> list[int]:
    """Return the number of rows for each rank.

    Args:
        kind: The collective, for messages.
        group: The ranks.
        array: The rows.
        splits: The user's numbers, or None.
        even: Whether all ranks must get equally many rows if `splits` is None.

    Raises:
        ValueError: The numbers do not fit the array or the ranks.
    """
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
    rows = [int(count) for count in given]  # Python's integers, because a sum of NumPy's may wrap
    if sum(rows) > array.shape[0]:
        raise ValueError(f"{kind}: splits add up to {sum(rows)}, but there are {array.shape[0]} rows")
    return rows


@Collective
def gather(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Operation[Array | None]:
    """Concatenate all ranks' arrays along the first dimension, in rank order. Other ranks than the root get None.

    Args:
        array: Its first dimension may differ between ranks. Other dimensions and the dtype must agree.
        root_rank: A global rank, which gets the result.
        name: As for `broadcast_`.
        process_set: As for `broadcast_`.

    Raises:
        ValueError: `root_rank` is no member.
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
    array: Array | None,
    root_rank: int,
    splits: object = None,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Operation[Array]:
    """Divide root_rank's rows among the ranks. The result, this rank's rows, is on the host.

    Args:
        array: The root's rows. Other ranks may give None, and their arrays are ignored.
        root_rank: A global rank.
        splits: At the root, one whole number of rows per rank. None: as evenly as possible, the first ranks one more.
        name: As for `broadcast_`.
        process_set: As for `broadcast_`.

    Raises:
        ValueError: `root_rank` is no member. At the root also: there is no array, or the splits do not fit.
    """
    group = runtime.group_of(process_set)
    root = root_of(group, "scatter", root_rank)
    facts = (("root rank", group.ranks[root]),)
    if group.rank != root:
        return Operation(group, "scatter", name, facts, lambda at: label.receive(at.transport, root)[0], None)
    if array is None:
        raise ValueError("scatter: the root must give a tensor")
    array = on_host(array)  # the other ranks cannot know whether it is on a GPU
    blocks = split_rows(array, rows_to_send("scatter", group, array, splits, even=False))
    labels = [label.encode(block.shape, block.dtype) for block in blocks]

    def work(at: Workplace) -> Array:
        movement.scatter(at.transport, labels)
        movement.scatter(at.transport, blocks)
        return blocks[root].copy()

    return Operation(group, "scatter", name, facts, work, array)


@Collective
def barrier(process_set: ProcessSet | None = None) -> Operation[None]:
    """Wait until every member of the process set has called this.

    Args:
        process_set: The ranks that take part. Default: all ranks.
    """
    group = runtime.group_of(process_set)
    return Operation(group, "barrier", None, (), lambda at: None, None)
