"""Nodes of TF1 graphs that wait for other ranks without occupying a thread of the session.

A session runs independent nodes in any order, a few at a time. With two threads, one rank may wait in nodes a and b
while the other rank waits in c and d: a deadlock. So another thread does the node's work. An iterator over an endless
dataset has its own thread, and a node that asks the iterator for the next element occupies no thread of the session.

    deposit (a Python node: keeps the inputs)  ->  next element (asynchronous: calls the function with the inputs)

One such node costs about 1 ms. Gradients do not pay this cost: control edges order their nodes, so at most one waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from hvdlite.arrays import Array
from hvdlite.tensorflow_graph import private_api


def apart(
    function: Callable[..., Sequence[object]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], name: str | None
) -> list[tf.Tensor]:
    """Return the results of function(*inputs as arrays). Each run of the graph calls the function in another thread."""
    deposited: list[tuple[Array, ...]] = []

    def deposit(*arrays: Array) -> np.int32:
        deposited[:] = [arrays]  # also drops the inputs of an earlier run that failed
        return np.int32(0)

    def work(_: Array) -> Sequence[object]:
        if not deposited:
            raise RuntimeError(
                f"the operation {name or 'without a name'} runs in two calls of session.run at the same time: run the "
                "graph in one thread at a time"
            )
        return function(*deposited.pop())

    def element(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(tf.numpy_function(work, [number], list(dtypes)))

    do_not_convert = tf.autograph.experimental.do_not_convert
    endless = tf.data.Dataset.from_tensors(0).repeat()
    # Dataset.map would call the function in a thread of the session.
    dataset = private_api.SESSION_DATASET.get()(endless, do_not_convert(element), use_inter_op_parallelism=False)
    iterator = tf.compat.v1.data.make_one_shot_iterator(dataset.with_options(no_optimizations()))
    ready = tf.numpy_function(do_not_convert(deposit), list(inputs), tf.int32, name=name)
    with tf.control_dependencies([ready]):
        return list(iterator.get_next())


def no_optimizations() -> tf.data.Options:
    """Return options that keep TensorFlow from optimizing a dataset, and so from computing elements ahead of time."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options
