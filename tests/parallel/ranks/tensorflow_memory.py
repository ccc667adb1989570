"""The ranks' shared memory is freed with the model whose gradients lie there, even if Keras keeps the graphs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any
from weakref import ref

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite.gradients.lists import MANY
from tests.parallel.common import require_error

SIZES = (2,)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:hvdlite")


def reduced(variables: list[tf.Variable]) -> float:
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.add_n([tf.reduce_sum(v * v) for v in variables]) * (hvd.rank() + 1)
    grads = tape.gradient(loss, variables)
    assert all(
        (grad == 2 * value * (hvd.size() + 1) / 2).numpy().all() for grad, value in zip(grads, variables, strict=True)
    )
    return float(grads[0][0, 0])


def check_tapes_of_models_that_are_no_more() -> None:
    """Each model has other shapes. Two models live on and are reduced as before."""
    lasting = [[tf.Variable(tf.fill((50, width), 3.0))] for width in (7, 8)]
    before = most = mappings()
    for width in range(100, 100 + 5 * MANY):
        model = [tf.Variable(tf.ones((50, width))) for _ in range(2)]
        for _ in range(2):
            reduced(model)
        assert [reduced(one) for one in lasting] == [3.0 * (hvd.size() + 1)] * 2
        del model
        gc.collect()
        hvd.broadcast_object(0)  # no rank makes the next list before all ranks have freed this one
        most = max(most, mappings())
    assert most - before <= hvd.size() * (MANY + 4), (before, most)  # lanes need some mappings


def check_keras_optimizers_that_are_no_more() -> None:
    def train() -> None:
        model = keras.Sequential([keras.layers.Input((30,)), keras.layers.Dense(40), keras.layers.Dense(1)])
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
        data = np.ones((8, 30), np.float32)
        model.fit(data, data[:, :1], batch_size=4, verbose=0)

    train()
    gc.collect()
    before = mappings()
    for _ in range(3):
        train()
        gc.collect()
        assert mappings() == before


def check_an_optimizer_attached_anew() -> None:
    """Keras keeps the earlier graphs; to run one of them is an error."""
    model = keras.Sequential([keras.layers.Input((30,)), keras.layers.Dense(40), keras.layers.Dense(1)])
    optimizer, data, found = keras.optimizers.SGD(0.01), np.ones((8, 30), np.float32), []

    def attach_anew() -> None:
        hvd.shutdown()
        hvd.init()
        hvd.DistributedOptimizer(optimizer)

    for _ in range(4):
        attach_anew()
        model.compile(optimizer, "mse")
        model.fit(data, data[:, :1], batch_size=4, verbose=0)
        gc.collect()
        found.append(mappings())
    assert found[0] > 0 and len(set(found[1:])) == 1, found
    attach_anew()
    require_error(tf.errors.OpError, lambda: model.fit(data, data[:, :1], batch_size=4, verbose=0), "attached again")


def check_graphs_that_are_no_more() -> None:
    """Graphs with collectives are freed, also if the collectives are differentiated once or by nested tapes."""

    def trace(weight: tf.Variable) -> Any:
        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape, hvd.DistributedGradientTape(tf.GradientTape()) as inner:
                everyones = [hvd.allreduce(x * weight), hvd.broadcast(x, 0), hvd.alltoall(hvd.allgather(x))[0]]
                loss = tf.add_n([tf.reduce_sum(each) for each in everyones])
            del tape
            return inner.gradient(loss, weight)

        step(tf.ones(2))
        return ref(step.get_concrete_function(tf.ones(2)).graph)

    weight = tf.Variable(1.0)
    graphs = [trace(weight) for _ in range(3)]
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 3


def check_a_graph_that_outlives_its_optimizer() -> None:
    """The graph works as long as its variables exist."""
    weight = tf.Variable(tf.ones(3))

    def traced() -> tuple[tf.types.experimental.ConcreteFunction, list[keras.Variable]]:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5))
        optimizer.build([weight])

        @tf.function
        def step() -> None:
            optimizer.apply([weight * (hvd.rank() + 1.0)], [weight])

        return step.get_concrete_function(), optimizer.variables

    step, _kept = traced()
    for turn in range(1, 4):
        step()
        gc.collect()
        np.testing.assert_allclose(weight, (1 - (hvd.size() + 1) / 4) ** turn)
