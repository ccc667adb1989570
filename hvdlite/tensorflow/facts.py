"""Who we are, asked each time that a graph runs; and join."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from hvdlite.job import runtime
from hvdlite.ops import join as joining
from hvdlite.tensorflow_graph.graph import call


def fact(function: Callable[[], int], name: str | None) -> tf.Tensor:
    """A whole number that is asked for each time that the graph runs."""
    return call(lambda: [np.array(function(), np.int32)], [], [tf.int32], [()], name)[0]


def rank_op(name: str | None = None) -> tf.Tensor:
    """rank() when the graph runs."""
    return fact(runtime.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """local_rank() when the graph runs."""
    return fact(runtime.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """local_size() when the graph runs."""
    return fact(runtime.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """The number of ranks of a process set when the graph runs. Raises InvalidArgumentError for an unknown one."""
    return fact(lambda: len(members(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """When the graph runs: 1 where this rank is in the process set, else 0; -1 before init(), -3 for an unknown set."""

    def included() -> int:
        if not runtime.is_initialized():
            return -1
        known = runtime.current().groups.ranks
        return int(runtime.rank() in known[process_set_id]) if process_set_id in known else -3

    return fact(included, name)


def members(process_set_id: int) -> tuple[int, ...]:
    known = runtime.current().groups.ranks
    if process_set_id not in known:
        raise ValueError(f"there is no process set {process_set_id}")
    return known[process_set_id]


def join() -> tf.Tensor:
    """Wait until every rank has joined, helping the others' all-reduces meanwhile; the rank that joined last."""
    return fact(joining.join, None)


def gpu_available(name: str = "tensorflow", verbose: bool = False) -> bool:
    """Whether TensorFlow sees a GPU. name, verbose: accepted for Horovod's sake."""
    return bool(tf.config.list_physical_devices("GPU"))
