"""The collectives for NumPy and CuPy arrays, with Horovod's names and the forms that they have for torch.

Plain: waits, and returns a new array. `_async`: returns a number at once, for `synchronize`. A name that ends in `_`
changes its argument in place, whatever its layout. Numbers count as 0-dimensional arrays. Results of a scatter or
a message lie on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from hvdlite import ops
from hvdlite.algorithms.label import require_known
from hvdlite.arrays import Array
from hvdlite.checkpoints.archive import load, save
from hvdlite.job.process_sets import ProcessSet
from hvdlite.ops import Average, Op, op_of
from hvdlite.ops.handles import poll, remember, synchronize
from hvdlite.ops.objects import allgather_object, broadcast_object
from hvdlite.ops.variables import broadcast_arrays


def contiguous_copy(value: Any) -> Array:
    """value as a new contiguous array in this machine's byte order; plain numbers become 0-dimensional ones."""
    if hasattr(value, "__cuda_array_interface__"):
        there: Array = value.copy(order="C")
        return there
    copy = np.array(value, order="C")
    return copy if copy.dtype.isnative else copy.astype(copy.dtype.newbyteorder("="))


def contiguous(value: Any) -> Array:
    """The same, but value's own memory where it is so."""
    return memory_of(value) if hasattr(value, "dtype") and is_plain(value) and value.ndim else contiguous_copy(value)


def memory_of(array: Array) -> Array:
    """The same memory as an array of the plain kind: a matrix has two dimensions whatever is done to it."""
    return np.asarray(array) if isinstance(array, np.ndarray) else array


def is_plain(array: Any) -> bool:
    """Whether its memory is what ranks exchange."""
    return hasattr(array, "flags") and array.flags.c_contiguous and array.dtype.isnative


def in_place(array: Array) -> tuple[Array, Callable[[Any], Array]]:
    """Contiguous memory to work in, and what to call when it holds the result, which the array then has. Raises
    TypeError for what is no array, ValueError for one that may not be written."""
    if not hasattr(array, "flags") or not hasattr(array, "dtype"):
        raise TypeError(f"a collective in place takes an array, not {array!r}: the forms without _ return a new one")
    if not getattr(array.flags, "writeable", True):
        raise ValueError("the array is read-only: the forms of collectives without _ return a new one")
    if is_plain(array):
        return memory_of(array), lambda _: array
    copy = contiguous_copy(array)

    def put_back(_: Any) -> Array:
        array[...] = copy
        return array

    return copy, put_back


def allreduce(
    value: Any, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> Array:
    """The reduction of all ranks' arrays as a new array: Average (default), Sum, Min, Max, Product, Adasum. Waits for
    all ranks, of which each gives the same shape, dtype and arguments: else it raises MismatchError on every rank, and
    the job can go on. name: what messages call it; calls without one are matched by their order. prescale_factor,
    postscale_factor: multiply before and after. An average of integers is exact, truncated toward zero; of float16 it
    does not overflow. A Sum overflows as NumPy's: integers wrap around. float16 and bfloat16 are added in float32. Of
    booleans Sum and Max are the logical or, Min and Product the and; they have no Average."""
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return ops.allreduce_(contiguous_copy(value), *how)


def allreduce_async(
    value: Any, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> int:
    """`allreduce` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.allreduce_.start(contiguous_copy(value), *how))


def allreduce_(
    array: Array, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> Array:
    """`allreduce` in place; the result is the argument."""
    memory, deliver = in_place(array)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return deliver(ops.allreduce_(memory, *how))


def allreduce_async_(
    array: Array, average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> int:
    """`allreduce_` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    memory, deliver = in_place(array)
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.allreduce_.start(memory, *how), deliver)


def grouped_allreduce(
    values: Sequence[Any], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> list[Array]:
    """Several all-reduces as one operation; a list of new arrays. As many on every rank, else MismatchError."""
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return ops.grouped_allreduce_([contiguous_copy(value) for value in values], *how)


def grouped_allreduce_async(
    values: Sequence[Any], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> int:
    """`grouped_allreduce` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.grouped_allreduce_.start([contiguous_copy(value) for value in values], *how))


def grouped_allreduce_(
    arrays: Sequence[Array], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> tuple[Array, ...]:
    """Several all-reduces in place as one operation; the tuple of the arguments. Raises ValueError where arrays
    share memory."""
    memories = [in_place(array) for array in arrays]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    ops.grouped_allreduce_([memory for memory, _ in memories], *how)
    return tuple(deliver(None) for _, deliver in memories)


def grouped_allreduce_async_(
    arrays: Sequence[Array], average: bool | None = None, name: str | None = None, op: Op | int | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> int:
    """`grouped_allreduce_` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    memories = [in_place(array) for array in arrays]
    how = (ops.resolve_op(op, average), name, prescale_factor, postscale_factor, process_set)
    handle = ops.grouped_allreduce_.start([memory for memory, _ in memories], *how)
    return remember(handle, lambda _: tuple(deliver(None) for _, deliver in memories))


def reduce(
    value: Any, root_rank: int, op: Op | int = Average, name: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> Array | None:
    """`allreduce`, whose result root_rank (a global rank) alone gets; None elsewhere. Raises ValueError for a root that
    is no member."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return ops.reduce(contiguous(value), root_rank, *how)


def reduce_async(
    value: Any, root_rank: int, op: Op | int = Average, name: str | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: ProcessSet | None = None,
) -> int:
    """`reduce` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.reduce.start(contiguous(value), root_rank, *how))


def reducescatter(
    value: Any, name: str | None = None, op: Op | int = Average, process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> Array:
    """This rank's rows of `allreduce`, by Average (default) or Sum: dealt out in rank order as evenly as possible, the
    first ranks one more. Waits for all ranks; MismatchError as there."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return ops.reducescatter(contiguous(value), *how)


def reducescatter_async(
    value: Any, name: str | None = None, op: Op | int = Average, process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """`reducescatter` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.reducescatter.start(contiguous(value), *how))


def grouped_reducescatter(
    values: Sequence[Any], name: str | None = None, op: Op | int = Average, process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> list[Array]:
    """Several reduce-scatters as one operation; a list."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return ops.grouped_reducescatter([contiguous(value) for value in values], *how)


def grouped_reducescatter_async(
    values: Sequence[Any], name: str | None = None, op: Op | int = Average, process_set: ProcessSet | None = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0,
) -> int:
    """`grouped_reducescatter` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    how = (op_of(op), name, prescale_factor, postscale_factor, process_set)
    return remember(ops.grouped_reducescatter.start([contiguous(value) for value in values], *how))


def allgather(value: Any, name: str | None = None, process_set: ProcessSet | None = None) -> Array:
    """All ranks' arrays concatenated in rank order along the first dimension, which may differ. Waits for all ranks;
    raises MismatchError on every rank where dtypes or other dimensions differ."""
    return ops.allgather(contiguous(value), name, process_set)


def allgather_async(value: Any, name: str | None = None, process_set: ProcessSet | None = None) -> int:
    """`allgather` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    return remember(ops.allgather.start(contiguous(value), name, process_set))


def grouped_allgather(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> list[Array]:
    """Several all-gathers as one operation; a list."""
    return ops.grouped_allgather([contiguous(value) for value in values], name, process_set)


def grouped_allgather_async(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """`grouped_allgather` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    return remember(ops.grouped_allgather.start([contiguous(value) for value in values], name, process_set))


def gather(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Array | None:
    """`allgather`, whose result root_rank (a global rank) alone gets; None elsewhere."""
    return ops.gather(contiguous(value), root_rank, name, process_set)


def gather_async(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """`gather` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    return remember(ops.gather.start(contiguous(value), root_rank, name, process_set))


def scatter(
    value: Any, root_rank: int, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Array:
    """This rank's rows of root_rank's array: splits[0] rows for rank 0, and so on; without splits as evenly as
    possible. Elsewhere value may be None. Waits for all ranks. Raises ValueError for splits that are not one number per
    rank, or more than there are rows."""
    array = None if value is None else contiguous(value)
    return ops.scatter(array, root_rank, splits, name, process_set)


def scatter_async(
    value: Any, root_rank: int, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """`scatter` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    array = None if value is None else contiguous(value)
    return remember(ops.scatter.start(array, root_rank, splits, name, process_set))


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Array:
    """root_rank's array, as a new array on every rank. Waits for all ranks, of which each gives an array of the same
    shape and dtype: else MismatchError on every rank. Raises ValueError for a root that is no member."""
    return ops.broadcast_(contiguous_copy(value), root_rank, name, process_set)


def broadcast_async(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """`broadcast` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    return remember(ops.broadcast_.start(contiguous_copy(value), root_rank, name, process_set))


def broadcast_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> Array:
    """`broadcast` in place; the result is the argument."""
    memory, deliver = in_place(array)
    return deliver(ops.broadcast_(memory, root_rank, name, process_set))


def broadcast_async_(
    array: Array, root_rank: int, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """`broadcast_` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
    memory, deliver = in_place(array)
    return remember(ops.broadcast_.start(memory, root_rank, name, process_set), deliver)


def alltoall_with_counts(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> tuple[Array, Array]:
    """The rows that all ranks sent here, in rank order, and how many each sent (int32). See `alltoall`."""
    return ops.alltoall(contiguous(value), splits, name, process_set)


def alltoall_async(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> int:
    """`alltoall` without waiting. Asynchronous: returns a number, and `synchronize` gives the result."""
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
    """`send` without waiting. Asynchronous: returns a number for `synchronize`, which returns None.

    The array must not change before.
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
    """`recv` without waiting. Asynchronous: returns a number, for which `synchronize` gives the array."""
    return remember(ops.letter_from(source, name, process_set).start_receive(), itemgetter(0))


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet | None = None
) -> Any:
    """Send the first splits[0] rows to rank 0, the next splits[1] to rank 1, and so on; without splits equal parts. The
    rows that all ranks sent here, in rank order; with splits also how many each sent (int32). Waits for all ranks.
    Raises MismatchError on every rank where dtypes or other dimensions differ; ValueError for splits that are not one
    number per rank or more than there are rows, and for rows that do not divide."""
    rows, received = alltoall_with_counts(value, splits, name, process_set)
    return rows if splits is None else (rows, received)


def broadcast_variables(variables: Any, root_rank: int = 0, process_set: ProcessSet | None = None) -> None:
    """Overwrite arrays with root_rank's, in place. variables: an array, or a dict or sequence of arrays. Waits for all
    ranks. Raises MismatchError with a diff, on every rank, where names, shapes or dtypes differ; TypeError for what is
    no array."""
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
    "allgather", "allgather_async", "allgather_object", "allreduce", "allreduce_", "allreduce_async",
    "allreduce_async_", "alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_",
    "broadcast_object", "broadcast_variables", "gather", "gather_async", "grouped_allgather",
    "grouped_allgather_async", "grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async",
    "grouped_allreduce_async_", "grouped_reducescatter", "grouped_reducescatter_async", "load", "poll", "recv",
    "recv_async", "reduce", "reduce_async", "reducescatter", "reducescatter_async", "save", "scatter", "scatter_async",
    "send", "send_async", "synchronize",
]  # fmt: skip
