"""Ranks and sizes as tensors that a graph computes at each run; also `join` and `gpu_available`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdlite.job import runtime
from hvdlite.ops import join as joining
from hvdlite.tensorflow_graph.graph import call, untouched


@untouched
def fact(function: Callable[[], int], name: str | None) -> tf.Tensor:
    """Return a whole number as an int32 tensor. In a graph, each run calls the function again."""
    return call(lambda: [np.array(function(), np.int32)], [], [tf.int32], [()], name)[0]


def rank_op(name: str | None = None) -> tf.Tensor:
    """Return rank() as a tensor; in a graph, the rank when the graph runs.

    Args:
        name: The node's name in a graph.

    Returns:
        An int32 scalar tensor.

    Raises:
        tf.errors.FailedPreconditionError: Before init(). In a graph, when it runs.
    """
    return fact(runtime.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """Return local_rank() as a tensor; in a graph, the local rank when the graph runs.

    Args:
        name: The node's name in a graph.

    Returns:
        An int32 scalar tensor.

    Raises:
        tf.errors.FailedPreconditionError: Before init(). In a graph, when it runs.
    """
    return fact(runtime.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """Return local_size() as a tensor; in a graph, the local size when the graph runs.

    Args:
        name: The node's name in a graph.

    Returns:
        An int32 scalar tensor.

    Raises:
        tf.errors.FailedPreconditionError: Before init(). In a graph, when it runs.
    """
    return fact(runtime.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return a process set's number of ranks as a tensor; in a graph, the number when the graph runs.

    Args:
        process_set_id: The process set's number; 0 for all ranks.
        name: The node's name in a graph.

    Returns:
        An int32 scalar tensor.

    Raises:
        tf.errors.FailedPreconditionError: Before init(). In a graph, when it runs.
        tf.errors.InvalidArgumentError: There is no such process set. In a graph, when it runs.
    """
    return fact(lambda: len(members(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return whether this rank is in a process set, as a tensor; in a graph, when the graph runs.

    Args:
        process_set_id: The process set's number; 0 for all ranks.
        name: The node's name in a graph.

    Returns:
        An int32 scalar tensor: 1 for a member, 0 for other ranks, -1 before init(), -3 for an unknown process set.
    """

    def included() -> int:
        if not runtime.is_initialized():
            return -1
        known = runtime.current().groups.ranks
        return int(runtime.rank() in known[process_set_id]) if process_set_id in known else -3

    return fact(included, name)


def members(process_set_id: int) -> tuple[int, ...]:
    """Return the global ranks of a process set. Raises ValueError for an unknown one."""
    known = runtime.current().groups.ranks
    if process_set_id not in known:
        raise ValueError(
            f"there is no process set {process_set_id}, only {sorted(known)}: add it with hvd.add_process_set"
        )
    return known[process_set_id]


def join() -> tf.Tensor:
    """Wait until every rank has joined. Meanwhile this rank takes part in the other ranks' all-reduces with zeros.

    Returns:
        An int32 scalar tensor: the global rank that joined last.
    """
    return fact(joining.join, None)


def gpu_available(name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU.

    Args:
        name: Accepted for Horovod's sake.
        verbose: Accepted for Horovod's sake.

    Returns:
        True if TensorFlow lists a physical GPU.
    """
    return bool(tf.config.list_physical_devices("GPU"))
