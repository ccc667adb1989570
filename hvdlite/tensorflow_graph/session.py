"""Nodes of TF1 graphs that wait for other ranks without holding a thread of the session.

A session runs independent nodes in any order, a few at a time: with two threads one rank may wait in a and b, the
other in c and d, for ever. So the node's work is done elsewhere: an iterator over an endless dataset has a thread of
its own, and asking it for the next element occupies none of the session's.

    deposit (a Python node: keeps the inputs)  ->  next element (asynchronous: the function, called with them)

Costs about 1 ms per node, which gradients are spared: their nodes follow one another, so at most one waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.arrays import Array
from hvdlite.tensorflow_graph import private_api


def apart(
    function: Callable[..., Sequence[Any]], inputs: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], name: str | None
) -> list[tf.Tensor]:
    """The results of function(*inputs as arrays), called in another thread at each run of the graph."""
    deposited: list[tuple[Array, ...]] = []

    def deposit(*arrays: Array) -> Any:
        deposited[:] = [arrays]  # what an earlier run left, because it failed, is forgotten
        return np.int32(0)

    def work(_: Any) -> Sequence[Any]:
        if not deposited:
            raise RuntimeError(f"{name}: two runs of one operation at the same time")
        return function(*deposited.pop())

    def element(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return tuple(tf.numpy_function(work, [number], list(dtypes)))

    do_not_convert = tf.autograph.experimental.do_not_convert
    endless = tf.data.Dataset.from_tensors(0).repeat()
    # map() itself would call the function in the session's threads again.
    dataset = private_api.SESSION_DATASET.get()(endless, do_not_convert(element), use_inter_op_parallelism=False)
    iterator = tf.compat.v1.data.make_one_shot_iterator(dataset.with_options(as_it_is()))
    ready = tf.numpy_function(do_not_convert(deposit), list(inputs), tf.int32, name=name)
    with tf.control_dependencies([ready]):
        return list(iterator.get_next())


def as_it_is() -> tf.data.Options:
    """Options for a dataset that nothing is to be computed ahead of."""
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_optimization.apply_default_optimizations = False
    return options
