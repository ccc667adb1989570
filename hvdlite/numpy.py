"""Collectives on NumPy and CuPy arrays, under Horovod's names.

A function waits and returns new arrays, unless its name says otherwise. If the name contains `_async`, the function
returns a handle at once: a number for `synchronize`, which returns the result. If the name ends in `_`, the function
changes its arrays in place. Numbers are 0-dimensional arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import cast

import numpy as np

from hvdlite import ops
from hvdlite.algorithms.label import require_known
from hvdlite.api.metrics import Metric, average_metrics
from hvdlite.api.neighbors import hierarchical_neighbor_allreduce, neighbor_allreduce
from hvdlite.api.output import print as print  # not in __all__
from hvdlite.api.output import rank_zero_only
from hvdlite.api.seeds import seed
from hvdlite.api.shares import shard
from hvdlite.api.training_log import logger
from hvdlite.arrays import Array
from hvdlite.checkpoints.archive import load, save
from hvdlite.job.process_sets import ProcessSet
from hvdlite.ops import Average, Op, op_of
from hvdlite.ops.handles import poll, remember, synchronize
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.ops.variables import broadcast_arrays


def contiguous_copy(value: object) -> Array:
    """Return a new contiguous array in this machine's byte order. A number becomes a 0-dimensional array."""
    if hasattr(value, "__cuda_array_interface__"):
        return cast(Array, value).copy(order="C")
    copy = np.array(value, order="C")
    return copy if copy.dtype.isnative else copy.astype(copy.dtype.newbyteorder("="))


def contiguous(value: object) -> Array:
    """Return the value as a contiguous array: its own memory if that is contiguous, else a copy."""
    if hasattr(value, "dtype") and is_plain(array := cast(Array, value)) and array.ndim:
        return memory_of(array)
    return contiguous_copy(value)


def memory_of(array: Array) -> Array:
    """Return the array's memory as a plain array, because a NumPy matrix keeps its two dimensions in every view."""
    return np.asarray(array) if isinstance(array, np.ndarray) else array


def is_plain(array: Array) -> bool:
    """Return whether ranks can exchange the array's memory as it is."""
    return hasattr(array, "flags") and array.flags.c_contiguous and array.dtype.isnative


def in_place(array: Array) -> tuple[Array, Callable[[object], Array]]:
    """Return contiguous memory to work in, and a function that puts the result there into the array and returns it.

    Raises:
        TypeError: `array` is not an array.
        ValueError: The array is read-only.
    """
    if not hasattr(array, "flags") or not hasattr(array, "dtype"):
        raise TypeError(f"a collective in place takes an array, not {array!r}: those without a final _ take any")
    if not getattr(array.flags, "writeable", True):
        raise ValueError("the array is read-only: collectives without a final _ return a new one")
    if is_plain(array):
        return memory_of(array), lambda _: array
    copy = contiguous_copy(array)

    def put_back(_: object) -> Array:
        array[...] = copy
        return array

    return copy, put_back


def allreduce(
    value: object,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Array:
    """Reduce all ranks' arrays. Collective; waits for all ranks of the process set.

    An average of integers is exact, truncated toward zero; one of float16 does not overflow. A Sum of integers wraps
    around, as NumPy's does. float16 and bfloat16 are added in float32. Of booleans, Sum and Max are the logical or, and
    Min and Product the logical and.

    Args:
        value: An array or a number, of the same shape and dtype on every rank.
        average: Deprecated: use `op`.
        name: The call's name in messages, equal on all ranks. Calls without a name are matched by their order.
        op: Average (default), Sum, Min, Max, Product or Adasum.
        prescale_factor: Each rank's values are multiplied by it before the reduction.
        postscale_factor: The result is multiplied by it.
        process_set: The ranks that take part. Default: all ranks.

    Returns:
        The reduction, as a new array.

    Raises:
        MismatchError: The ranks' arguments differ. Every rank raises it, and the job can go on.
        ValueError: Both `op` and `average` are given, or booleans are to be averaged.
        NotImplementedError: Adasum is not defined for these ranks.
    """
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return ops.allreduce_(contiguous_copy(value), *how)


def allreduce_async(
    value: object,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Asynchronous `allreduce`: returns at once.

    Args:
        value, ...: As for `allreduce`.

    Returns:
        A handle for `synchronize`, which returns the reduction.
    """
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.allreduce_.start(contiguous_copy(value), *how))


def allreduce_(
    array: Array,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Array:
    """`allreduce` in place.

    Args:
        array: A writable array of any layout. The result overwrites it.
        average, ...: As for `allreduce`.

    Returns:
        The array itself.

    Raises:
        TypeError: `array` is not an array.
        ValueError: As for `allreduce`, or the array is read-only.
        MismatchError: As for `allreduce`.
    """
    memory, deliver = in_place(array)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return deliver(ops.allreduce_(memory, *how))


def allreduce_async_(
    array: Array,
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Asynchronous `allreduce_`: returns at once. The array must not be used before `synchronize` returns.

    Args:
        array, ...: As for `allreduce_`.

    Returns:
        A handle for `synchronize`, which returns the array.
    """
    memory, deliver = in_place(array)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.allreduce_.start(memory, *how), deliver)


def grouped_allreduce(
    values: Sequence[object],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Array]:
    """Reduce several arrays as one operation. Collective; waits for all ranks of the process set.

    Args:
        values: Arrays or numbers, at least one and equally many on every rank. Otherwise as for `allreduce`.
        average, ...: As for `allreduce`.

    Returns:
        The reductions, as new arrays.

    Raises:
        ValueError: As for `allreduce`, or `values` is empty.
        MismatchError: As for `allreduce`.
    """
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return ops.grouped_allreduce_([contiguous_copy(value) for value in values], *how)


def grouped_allreduce_async(
    values: Sequence[object],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Asynchronous `grouped_allreduce`: returns at once.

    Args:
        values, ...: As for `grouped_allreduce`.

    Returns:
        A handle for `synchronize`, which returns the reductions.
    """
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.grouped_allreduce_.start([contiguous_copy(value) for value in values], *how))


def grouped_allreduce_(
    arrays: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> tuple[Array, ...]:
    """`grouped_allreduce` in place.

    Args:
        arrays: Writable arrays of any layout, which share no memory. The results overwrite them.
        average, ...: As for `allreduce`.

    Returns:
        The arrays themselves.

    Raises:
        TypeError: An item of `arrays` is not an array.
        ValueError: As for `grouped_allreduce`, or an array is read-only, or two share memory.
        MismatchError: As for `allreduce`.
    """
    memories = [in_place(array) for array in arrays]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    ops.grouped_allreduce_([memory for memory, _ in memories], *how)
    return tuple(deliver(None) for _, deliver in memories)


def grouped_allreduce_async_(
    arrays: Sequence[Array],
    average: bool | None = None,
    name: str | None = None,
    op: Op | int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Asynchronous `grouped_allreduce_`: returns at once. The arrays must not be used before `synchronize` returns.

    Args:
        arrays, ...: As for `grouped_allreduce_`.

    Returns:
        A handle for `synchronize`, which returns the arrays.
    """
    memories = [in_place(array) for array in arrays]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    handle = ops.grouped_allreduce_.start([memory for memory, _ in memories], *how)
    return remember(handle, lambda _: tuple(deliver(None) for _, deliver in memories))


def reduce(
    value: object,
    root_rank: int,
    op: Op | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Array | None:
    """Reduce all ranks' arrays to one rank. Collective; waits for all ranks of the process set.

    Args:
        value: As for `allreduce`.
        root_rank: The global rank that gets the result.
        op: Average (default), Sum, Min, Max or Product.
        name, ...: As for `allreduce`.

    Returns:
        The reduction on root_rank, as a new array. None on other ranks.

    Raises:
        ValueError: `root_rank` is no member of the process set, or booleans are to be averaged.
        NotImplementedError: `op` is Adasum.
        MismatchError: As for `allreduce`.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return ops.reduce(contiguous(value), root_rank, *how)


def reduce_async(
    value: object,
    root_rank: int,
    op: Op | int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> int:
    """Asynchronous `reduce`: returns at once.

    Args:
        value, ...: As for `reduce`.

    Returns:
        A handle for `synchronize`, which returns the reduction on root_rank, and None elsewhere.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.reduce.start(contiguous(value), root_rank, *how))


def reducescatter(
    value: object,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Array:
    """Reduce all ranks' arrays, and divide the rows among the ranks.

    Collective; waits for all ranks of the process set.

    Args:
        value: An array of at least one dimension, of the same shape and dtype on every rank.
        name: As for `allreduce`.
        op: Average (default) or Sum.
        process_set, ...: As for `allreduce`.

    Returns:
        This rank's rows of the reduction, as a new array. Rows are divided in rank order, as evenly as possible; the
        first ranks get one more.

    Raises:
        ValueError: `value` is a number, or booleans are to be averaged.
        HvdliteError: `op` is neither Average nor Sum.
        MismatchError: As for `allreduce`.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return ops.reducescatter(contiguous(value), *how)


def reducescatter_async(
    value: object,
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Asynchronous `reducescatter`: returns at once.

    Args:
        value, ...: As for `reducescatter`.

    Returns:
        A handle for `synchronize`, which returns this rank's rows.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.reducescatter.start(contiguous(value), *how))


def grouped_reducescatter(
    values: Sequence[object],
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Array]:
    """Reduce-scatter several arrays as one operation. Collective; waits for all ranks of the process set.

    Args:
        values: Arrays, at least one and equally many on every rank. Otherwise as for `reducescatter`.
        name, ...: As for `reducescatter`.

    Returns:
        This rank's rows of each reduction, as new arrays.

    Raises:
        ValueError: As for `reducescatter`, or `values` is empty.
        HvdliteError: As for `reducescatter`.
        MismatchError: As for `allreduce`.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return ops.grouped_reducescatter([contiguous(value) for value in values], *how)


def grouped_reducescatter_async(
    values: Sequence[object],
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Asynchronous `grouped_reducescatter`: returns at once.

    Args:
        values, ...: As for `grouped_reducescatter`.

    Returns:
        A handle for `synchronize`, which returns this rank's rows of each reduction.
    """
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.grouped_reducescatter.start([contiguous(value) for value in values], *how))


def allgather(value: object, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """Concatenate all ranks' arrays along the first dimension. Collective; waits for all ranks of the process set.

    Args:
        value: An array. Its first dimension may differ between ranks. Other dimensions and the dtype must agree.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        The rows of all ranks, in rank order, as a new array.

    Raises:
        ScalarError: All ranks gave numbers.
        MismatchError: The ranks' arguments differ. Every rank raises it, and the job can go on.
    """
    return ops.allgather(contiguous(value), name, process_set)


def allgather_async(value: object, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Asynchronous `allgather`: returns at once.

    Args:
        value, ...: As for `allgather`.

    Returns:
        A handle for `synchronize`, which returns the rows of all ranks.
    """
    return remember(ops.allgather.start(contiguous(value), name, process_set))


def grouped_allgather(
    values: Sequence[object], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Array]:
    """All-gather several arrays as one operation. Collective; waits for all ranks of the process set.

    Args:
        values: Arrays, at least one and equally many on every rank. Otherwise as for `allgather`.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        A new array for each given one, with the rows of all ranks.

    Raises:
        ValueError: `values` is empty.
        ScalarError: As for `allgather`.
        MismatchError: As for `allgather`.
    """
    return ops.grouped_allgather([contiguous(value) for value in values], name, process_set)


def grouped_allgather_async(
    values: Sequence[object], name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Asynchronous `grouped_allgather`: returns at once.

    Args:
        values, ...: As for `grouped_allgather`.

    Returns:
        A handle for `synchronize`, which returns the new arrays.
    """
    return remember(ops.grouped_allgather.start([contiguous(value) for value in values], name, process_set))


def gather(
    value: object, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Array | None:
    """Concatenate all ranks' arrays on one rank. Collective; waits for all ranks of the process set.

    Args:
        value: As for `allgather`.
        root_rank: The global rank that gets the result.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        The rows of all ranks on root_rank, as a new array. None on other ranks.

    Raises:
        ValueError: `root_rank` is no member of the process set.
        ScalarError: As for `allgather`.
        MismatchError: As for `allgather`.
    """
    return ops.gather(contiguous(value), root_rank, name, process_set)


def gather_async(value: object, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Asynchronous `gather`: returns at once.

    Args:
        value, ...: As for `gather`.

    Returns:
        A handle for `synchronize`, which returns the rows on root_rank, and None elsewhere.
    """
    return remember(ops.gather.start(contiguous(value), root_rank, name, process_set))


def scatter(
    value: object, root_rank: int, splits: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Array:
    """Divide root_rank's rows among the ranks. Collective; waits for all ranks of the process set.

    Args:
        value: The rows, on root_rank. Other ranks' values are ignored and may be None.
        root_rank: A global rank.
        splits: On root_rank, one number of rows per rank. Default: as evenly as possible, the first ranks one more.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        This rank's rows, as a new array on the host.

    Raises:
        ValueError: `root_rank` is no member of the process set. On root_rank also: there is no array, `splits` is not
            one number per rank, or its sum exceeds the number of rows.
        MismatchError: As for `allreduce`.
    """
    array = None if value is None else contiguous(value)
    return ops.scatter(array, root_rank, splits, name, process_set)


def scatter_async(
    value: object, root_rank: int, splits: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Asynchronous `scatter`: returns at once.

    Args:
        value, ...: As for `scatter`.

    Returns:
        A handle for `synchronize`, which returns this rank's rows.
    """
    array = None if value is None else contiguous(value)
    return remember(ops.scatter.start(array, root_rank, splits, name, process_set))


def broadcast(value: object, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """Copy root_rank's array to every rank. Collective; waits for all ranks of the process set.

    Args:
        value: An array or a number, of the same shape and dtype on every rank.
        root_rank: A global rank.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        root_rank's values, as a new array.

    Raises:
        ValueError: `root_rank` is no member of the process set.
        MismatchError: The ranks' arguments differ. Every rank raises it, and the job can go on.
    """
    return ops.broadcast_(contiguous_copy(value), root_rank, name, process_set)


def broadcast_async(
    value: object, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Asynchronous `broadcast`: returns at once.

    Args:
        value, ...: As for `broadcast`.

    Returns:
        A handle for `synchronize`, which returns root_rank's values.
    """
    return remember(ops.broadcast_.start(contiguous_copy(value), root_rank, name, process_set))


def broadcast_(array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """`broadcast` in place.

    Args:
        array: A writable array of any layout. root_rank's values overwrite it.
        root_rank, ...: As for `broadcast`.

    Returns:
        The array itself.

    Raises:
        TypeError: `array` is not an array.
        ValueError: As for `broadcast`, or the array is read-only.
        MismatchError: As for `broadcast`.
    """
    memory, deliver = in_place(array)
    return deliver(ops.broadcast_(memory, root_rank, name, process_set))


def broadcast_async_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Asynchronous `broadcast_`: returns at once. The array must not be used before `synchronize` returns.

    Args:
        array, ...: As for `broadcast_`.

    Returns:
        A handle for `synchronize`, which returns the array.
    """
    memory, deliver = in_place(array)
    return remember(ops.broadcast_.start(memory, root_rank, name, process_set), deliver)


def alltoall_with_counts(
    value: object, splits: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> tuple[Array, Array]:
    """`alltoall`, but returns the numbers of rows even if there are no splits."""
    return ops.alltoall(contiguous(value), splits, name, process_set)


def alltoall_async(
    value: object, splits: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """Asynchronous `alltoall`: returns at once.

    Args:
        value, ...: As for `alltoall`.

    Returns:
        A handle for `synchronize`, which returns the rows, and how many rows each rank sent (int32).
    """
    return remember(ops.alltoall.start(contiguous(value), splits, name, process_set))


def send(value: object, dest: int, name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Send an array to a rank that calls `recv`, and wait until it has received the array.

    Two ranks that both send first and receive then wait for each other: let one of them use `send_async`.

    Args:
        value: An array of any shape, or a number.
        dest: A global rank.
        name: Equal on both sides. Messages without a name are numbered, each way.
        process_set: Both ranks are its members. Default: all ranks.

    Raises:
        ValueError: `dest` is no member, or is this rank.
        ShutdownError: The other rank has shut down.
    """
    array = contiguous(value)
    require_known(array.dtype)  # before a number is taken
    ops.letter_to(dest, name, process_set).send(array)


def send_async(value: object, dest: int, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Asynchronous `send`: returns at once. The array must not change before `synchronize` returns.

    Args:
        value, ...: As for `send`.

    Returns:
        A handle for `synchronize`, which returns None when the other rank has received the array.
    """
    array = contiguous(value)
    require_known(array.dtype)  # before a number is taken
    return remember(ops.letter_to(dest, name, process_set).start_send(array))


def recv(source: int, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """Wait for an array that a rank sends here.

    Args:
        source: A global rank.
        name: As for `send`.
        process_set: As for `send`.

    Returns:
        A new array on the host.

    Raises:
        ValueError: `source` is no member, or is this rank.
        ShutdownError: The other rank has shut down.
    """
    return ops.letter_from(source, name, process_set).receive()[0]


def recv_async(source: int, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """Asynchronous `recv`: returns at once.

    Args:
        source, ...: As for `recv`.

    Returns:
        A handle for `synchronize`, which returns the array.
    """
    return remember(ops.letter_from(source, name, process_set).start_receive(), itemgetter(0))


def alltoall(
    value: object, splits: object = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Array | tuple[Array, Array]:
    """Send rows to every rank, and receive rows from every rank. Collective; waits for all ranks of the process set.

    Args:
        value: An array. The first splits[0] rows go to rank 0, the next splits[1] rows to rank 1, and so on.
        splits: One number of rows per rank. Their sum is at most the number of rows. Default: equal parts.
        name: As for `allreduce`.
        process_set: As for `allreduce`.

    Returns:
        The rows that all ranks sent here, in rank order, as a new array. If `splits` is given: a tuple of these rows,
        and of how many rows each rank sent (int32).

    Raises:
        ValueError: `splits` does not fit, or there are none and the rows cannot be divided into equal parts.
        MismatchError: As for `allgather`.
    """
    rows, received = alltoall_with_counts(value, splits, name, process_set)
    return rows if splits is None else (rows, received)


def broadcast_variables(variables: object, root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Overwrite arrays with root_rank's, in place. Collective; waits for all ranks of the process set.

    Args:
        variables: A writable array, or a dict or sequence of such arrays.
        root_rank: A global rank.
        process_set: The ranks that take part. Default: all ranks.

    Raises:
        MismatchError: The ranks' names, shapes or dtypes differ. Every rank raises it, with a diff.
        TypeError: An item of `variables` is not an array.
        ValueError: `root_rank` is no member of the process set, or an array is read-only.
    """
    if isinstance(variables, Mapping):
        named = sorted(((str(name), array) for name, array in variables.items()), key=itemgetter(0))
    else:
        several = [variables] if hasattr(variables, "dtype") or not isinstance(variables, Iterable) else variables
        named = [(f"array {index}", array) for index, array in enumerate(several)]
    for name, array in named:
        if not hasattr(array, "dtype"):
            said = f"{name} is of type {type(array).__name__}"
            raise TypeError(f"broadcast_variables takes an array, or a dict or sequence of arrays: {said}")
    memories = [in_place(array) for _, array in named]
    broadcast_arrays([memory for memory, _ in memories], [name for name, _ in named], root_rank, process_set)
    for _, deliver in memories:
        deliver(None)


__all__ = [
    "Metric", "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "average_metrics", "broadcast", "broadcast_", "broadcast_async",
    "broadcast_async_", "broadcast_object", "broadcast_variables", "gather", "gather_async", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async",
    "hierarchical_neighbor_allreduce", "load", "logger", "neighbor_allreduce", "poll", "rank_zero_only", "recv",
    "recv_async", "reduce", "reduce_async", "reducescatter", "reducescatter_async", "save", "scatter", "scatter_async",
    "seed", "send", "send_async", "shard", "synchronize",
]  # fmt: skip
