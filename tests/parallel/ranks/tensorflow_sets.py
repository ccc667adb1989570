"""TensorFlow among some of the ranks, and ranks without any data left."""

from __future__ import annotations

from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as keras_hvd
from tests.parallel.common import require_error

SIZES = (3,)


def restart(**arguments: Any) -> None:
    hvd.shutdown()
    hvd.init(**arguments)


def check_collectives_in_a_set() -> None:
    odd = hvd.ProcessSet([0, 2])
    restart(process_sets=[odd])
    try:
        rank = hvd.rank()
        np.testing.assert_array_equal(hvd.size_op(odd.process_set_id), 2)
        np.testing.assert_array_equal(hvd.process_set_included_op(odd.process_set_id), int(rank != 1))
        np.testing.assert_array_equal(hvd.process_set_included_op(7), -3)
        if rank == 1:
            require_error(
                tf.errors.InvalidArgumentError, lambda: hvd.allreduce(tf.ones(1), process_set=odd), "not a member"
            )
            return
        x = tf.constant([float(rank)])
        for mode in (lambda f: f(), lambda f: tf.function(f)()):
            np.testing.assert_array_equal(mode(lambda: hvd.allreduce(x, process_set=odd)), [1.0])
            np.testing.assert_array_equal(mode(lambda: hvd.allgather(x, process_set=odd)), [0.0, 2.0])
            np.testing.assert_array_equal(mode(lambda: hvd.broadcast(x, 2, process_set=odd)), [2.0])
            np.testing.assert_array_equal(
                mode(lambda: hvd.reducescatter(tf.stack([x, x]), op=hvd.Sum, process_set=odd)), [[2.0]]
            )
            np.testing.assert_array_equal(mode(lambda: hvd.alltoall(tf.concat([x, x], 0), process_set=odd)), [0.0, 2.0])
        variable = tf.Variable(x)
        hvd.broadcast_variables([variable], 2, process_set=odd)
        np.testing.assert_array_equal(variable, [2.0])
    finally:
        restart()


def check_one_function_in_a_set_and_among_all() -> None:
    """Members call more operations than other ranks. All ranks' operations still match, by name or by tensor."""
    odd = hvd.ProcessSet([0, 2])
    restart(process_sets=[odd])
    try:

        def call(x: tf.Tensor) -> list[Any]:
            its: list[dict[str, Any]] = [{"process_set": odd}] if hvd.rank() != 1 else []
            where = [*its, {}]
            sums = [hvd.allreduce(x, op=hvd.Sum, **each) for each in where]
            rows = [hvd.allgather(x, name="rows", **each) for each in where]
            largest = hvd.grouped_allreduce([x, x], op=hvd.Max, process_set=None)[1]  # None means all ranks
            return [sums[-1], rows[-1], largest, *sums[:-1], *rows[:-1]]

        x = tf.constant([hvd.rank() + 1.0])
        for function in (call, tf.function(call)):
            results = function(x)
            expected = [[6.0], [1.0, 2.0, 3.0], [3.0], [4.0], [1.0, 3.0]]
            for result, value in zip(results, expected[: len(results)], strict=True):
                np.testing.assert_array_equal(result, value)
            assert len(results) == (3 if hvd.rank() == 1 else 5)
    finally:
        restart()


def check_training_in_a_set() -> None:
    """Members average among themselves; other ranks train alone."""
    odd = hvd.ProcessSet([0, 2])
    restart(process_sets=[odd])
    try:
        own = [1.0, 5.0, 3.0][hvd.rank()]
        expected = 5.0 if hvd.rank() == 1 else 2.0
        gradient = tf.constant([own])
        variable = keras.Variable(np.zeros(1, np.float32))
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=odd).apply([gradient], [variable])
        np.testing.assert_array_equal(variable, [-expected])
        w = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = w * gradient
        np.testing.assert_array_equal(hvd.DistributedGradientTape(tape, process_set=odd).gradient(loss, w), [expected])
    finally:
        restart()


def check_fit_in_a_set_under_the_callback() -> None:
    """A rank outside the set trains alone, as intended."""
    odd = hvd.ProcessSet([0, 2])
    restart(process_sets=[odd])
    try:
        trained = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
        trained.compile(keras_hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), process_set=odd), "mse")
        rows = np.full((12, 3), hvd.rank() + 1.0)
        callbacks = [keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        trained.fit(rows, rows[:, :1], batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
        first, alone, third = hvd.allgather_object(np.asarray(trained.layers[-1].kernel).tolist())
        assert first == third != alone
    finally:
        restart()


def check_gradients_of_other_kinds_in_a_set() -> None:
    """Gradients of embeddings, local variables and collectives are divided by the number of members."""
    odd = hvd.ProcessSet([0, 2])
    restart(process_sets=[odd])
    try:
        rank = hvd.rank()
        if rank == 1:
            return
        table, local, x = tf.Variable(tf.zeros([3, 1])), tf.Variable([1.0]), tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank])) * 4.0 + local * 6.0
        tape = hvd.DistributedGradientTape(tape, process_set=odd)
        tape.register_local_source(local)
        sparse, own = tape.gradient(loss, [table, local])
        np.testing.assert_array_equal(tf.convert_to_tensor(sparse), [[2.0], [0.0], [2.0]])
        np.testing.assert_array_equal(own, [3.0])
        slices = tf.IndexedSlices(tf.constant([[4.0]]), tf.constant([rank]), tf.constant([3, 1]))
        mean = hvd.allreduce(slices, process_set=odd)
        np.testing.assert_array_equal(tf.convert_to_tensor(mean), [[2.0], [0.0], [2.0]])
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(hvd.allgather(x, process_set=odd) * [3.0, 5.0])
        np.testing.assert_array_equal(tape.gradient(y, x), [3.0 if rank == 0 else 5.0])
    finally:
        restart()


def check_a_removed_set() -> None:
    """In eager mode and in earlier graphs, errors name the set and the cure; then the cure works."""
    s = hvd.ProcessSet([0, 2])
    restart(process_sets="dynamic")
    hvd.add_process_set(s)
    gradient, variable = tf.constant([float(hvd.rank())]), keras.Variable(np.zeros(1, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=s)
    v1_variable, v1 = tf.Variable([0.0]), tf.compat.v1.train.GradientDescentOptimizer(1.0)
    hvd.DistributedOptimizer(v1, process_set=s)
    step = tf.function(lambda: optimizer.apply([gradient], [variable]))

    def by_tape() -> Any:
        with tf.GradientTape() as tape:
            loss = v1_variable * gradient
        return hvd.DistributedGradientTape(tape, process_set=s).gradient(loss, v1_variable)

    try:
        step()
        by_tape()
        hvd.remove_process_set(s)
        if hvd.rank() != 1:
            words = "[0, 2]", "remove_process_set", "hvd.add_process_set()"
            require_error(ValueError, lambda: optimizer.apply([gradient], [variable]), *words)
            require_error(tf.errors.InvalidArgumentError, step, *words)
            require_error(ValueError, lambda: v1.compute_gradients(lambda: v1_variable * 1.0, [v1_variable]), *words)
        require_error(ValueError, lambda: hvd.allreduce(gradient, process_set=s), "not registered")
        require_error(ValueError, by_tape, "[0, 2]", "not registered")
        hvd.add_process_set(s)
        for each in (optimizer, v1):
            hvd.DistributedOptimizer(each, process_set=s)
        expected = [1.0] if hvd.rank() != 1 else gradient
        np.testing.assert_array_equal(by_tape(), expected)
        variable.assign([0.0])
        optimizer.apply([gradient], [variable])
        np.testing.assert_array_equal(-variable, expected)
        hvd.remove_process_set(s)
    finally:
        restart()


def check_a_set_that_is_not_registered() -> None:
    """Making the operation raises ValueError: in eager mode, when tf.function traces it, and in a TF1 graph."""
    no: dict[str, Any] = {"process_set": hvd.ProcessSet([0, 2])}
    sgd = keras.optimizers.SGD()
    v1, kind = tf.compat.v1.train.GradientDescentOptimizer, hvd.LocalGradientAggregationHelper

    def calls() -> dict[str, Any]:
        x = tf.ones((3, 2))
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([0]), tf.constant([3, 2]))
        found = {
            f"{module.__name__}.{name}": partial(getattr(module, name), *given, **no)
            for module in (hvd, keras_hvd)
            for name, given in {
                "allreduce": [x], "allgather": [x], "broadcast": [x, 0], "reducescatter": [x], "alltoall": [x],
                "grouped_allreduce": [[x, x]], "grouped_allgather": [[x]], "grouped_reducescatter": [[x]],
                "broadcast_object": [1], "allgather_object": [1],
            }.items()
        }  # fmt: skip
        found |= {
            f"nothing to {name}": partial(getattr(hvd, name), [], **no)
            for name in ("grouped_allreduce", "grouped_allgather", "grouped_reducescatter", "broadcast_variables")
        }
        return found | {
            "sparse": lambda: hvd.allreduce(slices, **no),
            "sparse, grouped": lambda: hvd.grouped_allreduce([slices], **no),
            "broadcast_object_fn": lambda: hvd.broadcast_object_fn(**no),
            "tape": lambda: hvd.DistributedGradientTape(tf.GradientTape(), **no),
            "partial tape": lambda: hvd.PartialDistributedGradientTape(tf.GradientTape(), **no),
            "TF1 optimizer": lambda: hvd.DistributedOptimizer(v1(0.1), **no),
            "Keras optimizer": lambda: keras_hvd.DistributedOptimizer(sgd, **no),
            "aggregation": lambda: kind(2, lambda grads, variables: grads, False, False, **no),
        }

    def refuse(variable: Any, without: str = "none") -> None:
        for name, call in calls().items():
            if without not in name:
                require_error(ValueError, call, "not registered", "hvd.add_process_set()")
        for broadcast in (hvd.broadcast_variables, hvd.broadcast_):
            require_error(ValueError, lambda: broadcast([variable], 0, **no), "not registered")
        require_error(TypeError, lambda: hvd.broadcast(tf.ones(2), 0, process_set=3), "must be an hvd.ProcessSet")  # type: ignore[arg-type]

    variable = tf.Variable([1.0])
    refuse(variable)
    tf.function(lambda: refuse(variable), autograph=False)()
    with tf.Graph().as_default():
        refuse(tf.compat.v1.get_variable("v", [1]), without="eras")  # Keras 3 has no such graphs
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2), op=hvd.Sum), [3.0, 3.0])


def check_join_with_sparse_tensors() -> None:
    """Rank r adds row r in each of its r + 1 calls."""
    rank = hvd.rank()
    for i in range(rank + 1):
        total = hvd.allreduce(tf.IndexedSlices(tf.ones((1, 2)), [rank], (3, 2)), op=hvd.Sum)
        np.testing.assert_array_equal(tf.convert_to_tensor(total), [[float(o >= i)] * 2 for o in range(3)])
    assert int(hvd.join()) == 2


def check_join_with_sparse_gradients() -> None:
    """Rank r looks up row r in its r + 1 steps, and the steps move this row. Ranks that have joined add no rows."""
    rank, table = hvd.rank(), tf.Variable(np.zeros((3, 2), np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = keras.Variable(np.zeros((3, 2), np.float32))

    def lookup() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.gather(table, [rank])
        return hvd.DistributedGradientTape(tape).gradient(loss, table)

    @tf.function
    def step() -> None:
        optimizer.apply([tf.IndexedSlices(tf.ones((1, 2)), [rank], (3, 2))], [variable])

    lookup()
    step()
    variable.assign(np.zeros((3, 2)))
    for i in range(rank + 1):
        found = tf.convert_to_tensor(lookup())
        np.testing.assert_allclose(found, [[float(o >= i) / 3] * 2 for o in range(3)], rtol=1e-6)
        step()
    assert int(hvd.join()) == 2
    expected = [[-min(o + 1, rank + 1) / 3] * 2 for o in range(3)]
    np.testing.assert_allclose(variable, expected, rtol=1e-6)


def check_join() -> None:
    """Rank r trains r + 1 steps; ranks that have joined count as zeros."""
    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    step = tf.function(lambda: optimizer.apply([tf.ones(2)], [variable]))
    step()
    for _ in range(2):
        variable.assign([0.0, 0.0])
        for _ in range(hvd.rank() + 1):
            step()
        last = int(hvd.join())
        assert last == 2
        parts = [3 / 3, 2 / 3, 1 / 3]
        np.testing.assert_allclose(variable, [-sum(parts[: hvd.rank() + 1])] * 2, rtol=1e-6)
