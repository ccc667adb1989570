"""Broadcasts of one rank's variables and of Python objects, so that all ranks begin with the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.arrays import Array
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import common_name, have_layers_follow, inside, variables_of
from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet, global_process_set
from hvdlite.ops import objects
from hvdlite.ops.variables import broadcast_arrays
from hvdlite.sharding.slots import refuse_slots
from hvdlite.tensorflow.common import require_registered
from hvdlite.tensorflow_graph.graph import aligned_copy, call, untouched


@untouched
def broadcast_variables(
    variables: object, root_rank: int = 0, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> tf.Operation | None:
    """Overwrite variables with root_rank's, in place. Waits for all ranks of the process set.

    Args:
        variables: A model, layer, optimizer or module, or variables of TensorFlow or Keras in a dict or sequence.
        root_rank: The global rank that sends its values.
        process_set: The ranks that take part.
        inplace: Accepted for Horovod's sake; the variables are always overwritten.

    Returns:
        None in eager mode. In a graph, the operation that overwrites the variables when it runs.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, with a diff, if the ranks' variables differ in name, shape or
            dtype; before init(). In a graph, when it runs.
        TypeError: `variables` has no variables.
        ValueError: A model or layer is not built, the process set is not registered, or the variables are the state of
            an optimizer with sharded=True.
    """
    require_registered(process_set)
    found = variables_of(variables)
    refuse_slots("hvd.broadcast_variables", found)
    chosen = list(map(inside, found))
    if not chosen:
        return None if tf.executing_eagerly() else tf.no_op()
    values = received(chosen, root_rank, process_set)
    assigned = [variable.assign(value) for variable, value in zip(chosen, values, strict=True)]
    if not tf.executing_eagerly():
        return tf.group(*assigned)
    have_layers_follow(found)
    return None


def received(variables: Sequence[Variable], root_rank: int, process_set: ProcessSet) -> list[tf.Tensor]:
    """Return root_rank's values of these variables; one operation broadcasts all of them."""
    names = [common_name(variable) for variable in variables]

    def work(*arrays: Array) -> list[Array]:
        copies = [aligned_copy(array) for array in arrays]
        broadcast_arrays(copies, names, root_rank, process_set)
        return copies

    inputs = [tf.convert_to_tensor(each) for each in variables]
    return call(work, inputs, [each.dtype for each in inputs], [each.shape for each in inputs])


def broadcast_(
    variables: Sequence[Variable],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite variables with root_rank's, in place. Waits for all ranks of the process set.

    Args:
        variables: tf.Variables or Keras variables.
        root_rank: The global rank that sends its values.
        name: Accepted for Horovod's sake.
        process_set: The ranks that take part.

    Returns:
        The variables' new values, as tensors.

    Raises:
        tf.errors.FailedPreconditionError: On every rank, with a diff, if the ranks' variables differ; before init(). In
            a graph, when it runs.
        ValueError: The process set is not registered, or the variables are the state of an optimizer with sharded=True.
    """
    require_registered(process_set)
    refuse_slots("hvd.broadcast_", variables)
    chosen = list(map(inside, variables))
    values = received(chosen, root_rank, process_set)
    return [tf.convert_to_tensor(each.assign(value)) for each, value in zip(chosen, values, strict=True)]


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Make the operation that overwrites all variables of the TF1 graph with root_rank's.

    The operation waits for all ranks when it runs.

    Args:
        root_rank: The global rank that sends its values.

    Returns:
        The operation.

    Raises:
        RuntimeError: In eager mode, since TensorFlow keeps no list of all variables there.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "broadcast_global_variables is for TF1 graphs; with TF2 use hvd.broadcast_variables(model, root_rank)"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """A hook for MonitoredTrainingSession that broadcasts all variables after the session is created or restored.

    Attributes:
        root_rank: The global rank that sends its values.
        operation: The broadcast in the graph; None before `begin`.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        """Make the hook.

        Args:
            root_rank: The global rank that sends its values.
            device: Accepted for Horovod's sake.
        """
        super().__init__()
        self.root_rank = root_rank
        self.operation: tf.Operation | None = None

    def begin(self) -> None:
        """Add the broadcast to the graph. TensorFlow calls this method before it creates the session."""
        if self.operation is None or self.operation.graph != tf.compat.v1.get_default_graph():
            self.operation = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Broadcast the variables. Waits for all ranks. TensorFlow calls this method after it creates the session.

        Args:
            session: The new session.
            coord: The session's coordinator; unused.
        """
        session.run(self.operation)


def broadcast_object(
    obj: object = None,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return root_rank's object on every rank. Waits for all ranks of the process set.

    Args:
        obj: The object to send; other ranks' objects are ignored.
        root_rank: The global rank that sends its object.
        session: Accepted for Horovod's sake.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        On the root the object itself, on other ranks an unpickled copy.

    Raises:
        pickle.PicklingError: On every rank, if the root's object cannot be pickled.
    """
    return objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: object, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return all ranks' objects on every rank. Waits for all ranks of the process set.

    Args:
        obj: This rank's object; the ranks' objects may differ in type.
        session: Accepted for Horovod's sake.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        Unpickled copies of all objects, in rank order.

    Raises:
        pickle.PicklingError: On every rank, if one of the objects cannot be pickled.
    """
    return objects.allgather_object(obj, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[object], Any]:
    """Make a function that broadcasts an object. The function waits for all ranks; making it does not.

    Args:
        root_rank: The global rank that sends its object.
        session: Accepted for Horovod's sake.
        name: The operation's name, equal on all ranks.
        process_set: The ranks that take part.

    Returns:
        A function that takes an object and returns root_rank's, as `broadcast_object` does.

    Raises:
        ValueError: Before init(), or the process set is not registered.
    """
    runtime.group_of(process_set)
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)
