"""Starting alike, and collectives on values: numbers, arrays, tensors of the backend, Keras variables.

Each waits for all ranks, and raises on all of them where their arguments differ: MismatchError, on TensorFlow
tf.errors.FailedPreconditionError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdlite.gradients.compression import NoneCompressor, compressor
from hvdlite.gradients.variables import common_name, have_layers_follow, variables_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.keras.backends import collectives, to_given
from hvdlite.ops import Average, Op, resolve_op
from hvdlite.ops.variables import broadcast_arrays


def broadcast_variables(
    variables: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> None:
    """Overwrite the weights of a model, an optimizer's state, or variables in a dict or sequence with root_rank's.

    inplace: accepted for Horovod's sake; variables are always assigned to. Waits for all ranks. What layers keep beside
    variables (a vocabulary) stays.
    """
    give(variables, root_rank, process_set)


def give(variables: Any, root_rank: int, process_set: ProcessSet = global_process_set) -> bool | None:
    """`broadcast_variables`. Returns what `have_layers_follow` does."""
    chosen = variables_of(variables)
    values = [np.array(keras.ops.convert_to_numpy(variable), order="C") for variable in chosen]
    broadcast_arrays(values, [common_name(variable) for variable in chosen], root_rank, process_set)
    for variable, value in zip(chosen, values, strict=True):
        if runtime.rank() != root_rank:
            variable.assign(value)
    return have_layers_follow(chosen)


def broadcast_global_variables(root_rank: int) -> None:
    """Raises RuntimeError: Keras 3 has no list of all variables."""
    raise RuntimeError(
        "Keras 3 keeps no list of all variables: use hvd.broadcast_variables(model, root_rank), or "
        "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank) with model.fit"
    )


def collective(kind: str, value: Any, compression: Any = None, **arguments: Any) -> Any:
    """The backend's collective of this kind on a value; the result as what value is."""
    compression = NoneCompressor if compression is None else compressor(compression)
    small, context = compression.compress(keras.ops.convert_to_tensor(value))
    result = keras.ops.convert_to_tensor(getattr(collectives(), kind)(to_given(small), **arguments))
    return as_given(compression.decompress(result, context), value)


def grouped(kind: str, values: Sequence[Any], **arguments: Any) -> list[Any]:
    """The same for several values as one operation."""
    tensors = [to_given(keras.ops.convert_to_tensor(value)) for value in values]
    results = getattr(collectives(), kind)(tensors, **arguments)
    return [as_given(result, value) for result, value in zip(results, values, strict=True)]


def as_given(result: Any, value: Any) -> Any:
    """The result as what value is: a Keras variable for one, else a tensor of the backend."""
    if isinstance(value, keras.Variable):
        return keras.Variable(result, dtype=value.dtype, trainable=value.trainable)
    return keras.ops.convert_to_tensor(result)


def allreduce(
    value: Any, name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: Op | int | None = None, compression: Any = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The reduction of all ranks' values (Average by default), of the same shape and dtype. An average of integers is
    exact, truncated toward zero; of float16 it does not overflow. A Sum overflows as NumPy's: integers wrap around. Of
    booleans Sum is the logical or. compression: `Compression.none`, `.fp16` or `.bf16`. Waits for all ranks. Raises
    MismatchError on all where they differ, on TensorFlow tf.errors.FailedPreconditionError."""
    return collective(
        "allreduce", value, compression, op=resolve_op(op, average), name=name, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip


def allgather(value: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """All ranks' values concatenated in rank order along the first dimension, which may differ. Waits for all ranks."""
    return collective("allgather", value, name=name, process_set=process_set)


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """root_rank's value on every rank, each of which gives one of the same shape and dtype. Waits for all ranks."""
    return collective("broadcast", value, root_rank=root_rank, name=name, process_set=process_set)


def reducescatter(
    value: Any, name: str | None = None, op: Op | int = Average, process_set: ProcessSet = global_process_set
) -> Any:
    """This rank's rows of the reduction of all ranks' values, dealt out as evenly as possible. Waits for all ranks."""
    return collective("reducescatter", value, name=name, op=op, process_set=process_set)


def alltoall(
    value: Any, splits: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The rows that all ranks sent here, in rank order: splits[r] of each go to rank r, without splits equal parts;
    with splits also how many each sent. Waits for all ranks. Raises ValueError for splits that do not fit."""
    tensor = to_given(keras.ops.convert_to_tensor(value))
    result = collectives().alltoall(tensor, splits=splits, name=name, process_set=process_set)
    if splits is None:
        return as_given(result, value)
    return as_given(result[0], value), keras.ops.convert_to_tensor(result[1])


def grouped_allreduce(
    values: Sequence[Any], name: str | None = None, average: bool | None = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, op: Op | int | None = None, process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allreduce` of several values, as many on every rank, as one operation."""
    return grouped(
        "grouped_allreduce", values, op=resolve_op(op, average), name=name, prescale_factor=prescale_factor,
        postscale_factor=postscale_factor, process_set=process_set,
    )  # fmt: skip


def grouped_allgather(
    values: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`allgather` of several values, as many on every rank, as one operation."""
    return grouped("grouped_allgather", values, name=name, process_set=process_set)


def grouped_reducescatter(
    values: Sequence[Any], name: str | None = None, op: Op | int = Average,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`reducescatter` of several values, as many on every rank, as one operation."""
    return grouped("grouped_reducescatter", values, name=name, op=op, process_set=process_set)
