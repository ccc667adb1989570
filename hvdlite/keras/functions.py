"""Broadcasts of variables, and collectives on values: numbers, arrays, tensors of the backend, Keras variables.

Each function waits for all ranks. If the ranks' arguments differ, it raises MismatchError on all of them; on
TensorFlow, tf.errors.FailedPreconditionError. Results are `Any`: which class a tensor has depends on KERAS_BACKEND.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.gradients.compression import NoneCompressor, compressor
from hvdlite.gradients.tensors import Tensor
from hvdlite.gradients.variables import common_name, have_layers_follow, variables_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.keras.backends import collectives, to_given
from hvdlite.keras.strategy.outside import moving
from hvdlite.ops import Average, Op, resolve_op
from hvdlite.ops.variables import broadcast_arrays
from hvdlite.sharding.slots import refuse_slots


def broadcast_variables(
    variables: object, root_rank: int = 0, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Overwrite variables with root_rank's values, in place. Waits for all ranks.

    State that layers keep outside of variables (a vocabulary) stays.

    Args:
        variables: A model, an optimizer, or variables in a dict or sequence; the same on every rank.
        root_rank: The global rank that sends its values.
        process_set: The ranks that take part.
        inplace: Accepted for Horovod's sake; the variables are always overwritten.

    Raises:
        MismatchError: The ranks' variables differ, with a diff; on every rank.
        ValueError: A model or layer has not been built, `root_rank` is not in the process set, or the variables are
            the state of an optimizer with sharded=True.
        TypeError: `variables` has no variables.
    """
    give(variables, root_rank, process_set)


def give(variables: object, root_rank: int, process_set: ProcessSet = global_process_set) -> bool | None:
    """Do what `broadcast_variables` does, and return the result of `have_layers_follow`."""
    chosen = variables_of(variables)
    refuse_slots("hvd.broadcast_variables", chosen)
    with moving(chosen, process_set):
        values = [np.array(keras.ops.convert_to_numpy(variable), order="C") for variable in chosen]
        broadcast_arrays(values, [common_name(variable) for variable in chosen], root_rank, process_set)
        for variable, value in zip(chosen, values, strict=True):
            if runtime.rank() != root_rank:
                variable.assign(value)
    return have_layers_follow(chosen)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse: Keras 3 has no list of all variables.

    Args:
        root_rank: Accepted for Horovod's sake.

    Raises:
        RuntimeError: Always; the text names the functions to use instead.
    """
    raise RuntimeError(
        "Keras 3 keeps no list of all variables: use hvd.broadcast_variables(model, root_rank), or "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) with model.fit"
    )


def collective(kind: str, value: object, compression: object = None, **arguments: object) -> Any:
    """Run the backend's collective of this name on a value, and return the result as `as_given` does."""
    chosen = NoneCompressor if compression is None else compressor(compression)
    small, context = chosen.compress(keras.ops.convert_to_tensor(value))
    result = keras.ops.convert_to_tensor(getattr(collectives(), kind)(to_given(small), **arguments))
    return as_given(chosen.decompress(result, context), value)


def grouped(kind: str, values: Sequence[object], **arguments: object) -> list[Any]:
    """Run the backend's grouped collective of this name on several values, as one operation."""
    tensors = [to_given(keras.ops.convert_to_tensor(value)) for value in values]
    results = getattr(collectives(), kind)(tensors, **arguments)
    return [as_given(result, value) for result, value in zip(results, values, strict=True)]


def as_given(result: Tensor, value: object) -> Any:
    """Return the result as a Keras variable if `value` is one, else as a tensor of the backend."""
    if isinstance(value, keras.Variable):
        return keras.Variable(result, dtype=value.dtype, trainable=value.trainable)
    return keras.ops.convert_to_tensor(result)


def allreduce(
    value: object,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | int | None = None,
    compression: object = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce all ranks' values. Waits for all ranks.

    An average of integers is exact, truncated toward zero; one of float16 does not overflow. A Sum overflows as
    NumPy's: integers wrap around. Of booleans, Sum is the logical or.

    Args:
        value: A number, array, tensor of the backend or Keras variable; of the same shape and dtype on every rank.
        name: The operation's name, equal on all ranks.
        average: Deprecated: True for op=Average, False for op=Sum.
        prescale_factor: Multiplies the value before the reduction.
        postscale_factor: Multiplies the result.
        op: Average, Sum, Min, Max, Product or Adasum. None: Average.
        compression: `hvd.Compression.none`, `.fp16` or `.bf16`: the dtype in which the value travels. None: its own.
        process_set: The ranks that take part.

    Returns:
        The reduction, of the same shape and dtype: a new Keras variable if `value` is one, else a new tensor.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank. On TensorFlow, tf.errors.FailedPreconditionError.
        NotImplementedError: On JAX, the call is inside a function that JAX compiles.
    """
    return collective(
        "allreduce", value, compression, op=resolve_op(op, average), name=name, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip


def allgather(value: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Concatenate all ranks' values. Waits for all ranks.

    Args:
        value: As for `allreduce`, of at least one dimension; the first dimension may differ between ranks.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        The values in rank order, concatenated along the first dimension; a new variable or tensor, as of `allreduce`.

    Raises:
        MismatchError: dtypes or other dimensions differ; on every rank. On TensorFlow,
            tf.errors.FailedPreconditionError.
        NotImplementedError: As for `allreduce`.
    """
    return collective("allgather", value, name=name, process_set=process_set)


def broadcast(
    value: object, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Give every rank root_rank's value. Waits for all ranks.

    Args:
        value: As for `allreduce`; of the same shape and dtype on every rank.
        root_rank: The global rank that sends its value.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        root_rank's value; a new variable or tensor, as of `allreduce`.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank. On TensorFlow, tf.errors.FailedPreconditionError.
        NotImplementedError: As for `allreduce`.
    """
    return collective("broadcast", value, root_rank=root_rank, name=name, process_set=process_set)


def reducescatter(
    value: object, name: str | None = None, op: Op | int = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """Reduce all ranks' values and deal out the rows. Waits for all ranks.

    Args:
        value: As for `allreduce`, of at least one dimension; of the same shape and dtype on every rank.
        name: The operation's name, equal on all ranks.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        This rank's rows of the reduction; the first ranks get one more if the rows do not divide evenly. A new
        variable or tensor, as of `allreduce`.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank. On TensorFlow, tf.errors.FailedPreconditionError.
        NotImplementedError: As for `allreduce`.
    """
    return collective("reducescatter", value, name=name, op=op, process_set=process_set)


def alltoall(
    value: object, splits: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Send the first splits[0] rows to rank 0, the next splits[1] rows to rank 1, and so on. Waits for all ranks.

    Args:
        value: As for `allreduce`, of at least one dimension; the first dimension may differ between ranks.
        splits: One whole number per rank of the process set, a sum of at most the number of rows. None: each rank gets
            equally many rows.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        The rows that all ranks sent to this one, in rank order; a new variable or tensor, as of `allreduce`. With
        `splits`, a pair: these rows, and a tensor of the number of rows from each rank.

    Raises:
        ValueError: `splits` do not fit the rows or the ranks. On TensorFlow, tf.errors.InvalidArgumentError.
        MismatchError: dtypes or other dimensions differ; on every rank. On TensorFlow,
            tf.errors.FailedPreconditionError.
        NotImplementedError: As for `allreduce`.
    """
    tensor = to_given(keras.ops.convert_to_tensor(value))
    result = collectives().alltoall(tensor, splits=splits, name=name, process_set=process_set)
    if splits is None:
        return as_given(result, value)
    return as_given(result[0], value), keras.ops.convert_to_tensor(result[1])


def grouped_allreduce(
    values: Sequence[object],
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | int | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several values as one operation. Waits for all ranks.

    Args:
        values: Values as for `allreduce`; the same number of them on every rank.
        name: The operation's name, equal on all ranks.
        average: Deprecated: True for op=Average, False for op=Sum.
        prescale_factor: Multiplies each value before the reduction.
        postscale_factor: Multiplies the results.
        op: Average, Sum, Min, Max, Product or Adasum. None: Average.
        process_set: The ranks that take part.

    Returns:
        The reductions in the same order; new variables or tensors, as of `allreduce`.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank. On TensorFlow, tf.errors.FailedPreconditionError.
        NotImplementedError: As for `allreduce`.
    """
    return grouped(
        "grouped_allreduce", values, op=resolve_op(op, average), name=name, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip


def grouped_allgather(
    values: Sequence[object], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Concatenate several values of all ranks as one operation. Waits for all ranks.

    Args:
        values: Values as for `allgather`; the same number of them on every rank.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        For each value the result of `allgather`, in the same order.

    Raises:
        MismatchError: As for `allgather`.
        NotImplementedError: As for `allreduce`.
    """
    return grouped("grouped_allgather", values, name=name, process_set=process_set)


def grouped_reducescatter(
    values: Sequence[object],
    name: str | None = None,
    op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several values and deal out the rows of each, as one operation. Waits for all ranks.

    Args:
        values: Values as for `reducescatter`; the same number of them on every rank.
        name: The operation's name, equal on all ranks.
        op: Average or Sum.
        process_set: The ranks that take part.

    Returns:
        For each value the result of `reducescatter`, in the same order.

    Raises:
        MismatchError: The ranks' arguments differ; on every rank. On TensorFlow, tf.errors.FailedPreconditionError.
        NotImplementedError: As for `allreduce`.
    """
    return grouped("grouped_reducescatter", values, name=name, op=op, process_set=process_set)
