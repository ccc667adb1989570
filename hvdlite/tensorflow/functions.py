"""Starting alike: variables of one rank, given to all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdlite.arrays import Array
from hvdlite.gradients.variables import common_name, have_layers_follow, inside, variables_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import objects
from hvdlite.ops.variables import broadcast_arrays
from hvdlite.tensorflow.common import require_registered
from hvdlite.tensorflow_graph.graph import aligned_copy, call, untouched


@untouched
def broadcast_variables(
    variables: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Overwrite variables with root_rank's. variables: a model or optimizer, or variables of TensorFlow or Keras in a
    dict or sequence. Waits for all ranks.

    In a graph: returns the operation that does it, when it is run. inplace: accepted for Horovod's sake; variables
    are always assigned to. Raises tf.errors.FailedPreconditionError with a diff, on every rank, where the ranks'
    variables differ.
    """
    require_registered(process_set)
    found = variables_of(variables)
    chosen = list(map(inside, found))
    if not chosen:
        return None if tf.executing_eagerly() else tf.no_op()
    values = received(chosen, root_rank, process_set)
    assigned = [variable.assign(value) for variable, value in zip(chosen, values, strict=True)]
    if not tf.executing_eagerly():
        return tf.group(*assigned)
    have_layers_follow(found)
    return None


def received(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> list[tf.Tensor]:
    """root_rank's values of these variables, as one operation."""
    names = [common_name(variable) for variable in variables]

    def work(*arrays: Array) -> list[Array]:
        copies = [aligned_copy(array) for array in arrays]
        broadcast_arrays(copies, names, root_rank, process_set)
        return copies

    inputs = [tf.convert_to_tensor(each) for each in variables]
    return call(work, inputs, [each.dtype for each in inputs], [each.shape for each in inputs])


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Overwrite tf.Variables with root_rank's; returns their new values. name: accepted for Horovod's sake."""
    require_registered(process_set)
    chosen = list(map(inside, variables))
    values = received(chosen, root_rank, process_set)
    return [tf.convert_to_tensor(each.assign(value)) for each, value in zip(chosen, values, strict=True)]


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation that overwrites all of a TF1 graph's variables with root_rank's. Raises RuntimeError in eager mode,
    where there is no list of all variables."""
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables is for TF1 graphs; with TF2 use hvd.broadcast_variables(model, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """For MonitoredTrainingSession: after the session is made (or restored), gives every rank root_rank's variables."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        """device: accepted for Horovod's sake."""
        super().__init__()
        self.root_rank = root_rank
        self.operation: Any = None

    def begin(self) -> None:
        if self.operation is None or self.operation.graph != tf.compat.v1.get_default_graph():
            self.operation = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        session.run(self.operation)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, session: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """root_rank's object, on every rank. session: accepted for Horovod's sake; none is needed."""
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Every rank's object, in rank order, on every rank. session: accepted for Horovod's sake; none is needed."""
    return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """A function that takes an object and returns root_rank's. session: accepted for Horovod's sake."""
    runtime.group_of(process_set)
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)
