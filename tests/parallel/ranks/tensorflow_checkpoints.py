"""Checkpoints of Keras models, of optimizers in users' own loops, and of TensorFlow's variables."""

from __future__ import annotations

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvdlite
import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras
from tests.parallel.common import require_error, require_same_bits
from tests.parallel.keras_common import OPTIMIZERS, model, require_resuming

SIZES = (1, 2, 3)


def check_fit() -> None:
    require_resuming(hvdlite.tensorflow.keras)


def check_a_loop_with_a_tape() -> None:
    """An optimizer without a step gets its state; so do variables in a dict or a module."""

    class Part(tf.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.weight = tf.Variable([value, value], dtype=tf.bfloat16)

    def train(net: keras.Model, optimizer: keras.optimizers.Optimizer, steps: int) -> None:
        for _ in range(steps):
            with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_mean(net(tf.ones((2, 6)) + hvd.rank()) ** 2)
            optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)

    with tempfile.TemporaryDirectory() as name:
        path = Path(name if hvd.rank() == 0 else "/nowhere/at/all") / "run"
        hvd.barrier()
        net, optimizer, part, several = (
            model(),
            OPTIMIZERS["Adam"](),
            Part(0.1),
            {"a": tf.Variable(3), "b": tf.Variable([1.5])},
        )
        train(net, optimizer, 3)
        hvd.save(
            path, net=net, optimizer=optimizer, part=part, several=several, best=np.float32(0.5), history=[(1, 2.0)]
        )
        train(net, optimizer, 3)
        wanted = [np.array(each.numpy()) for each in [*net.weights, *optimizer.variables]]

        net, optimizer, part, several = (
            model(),
            OPTIMIZERS["Adam"](),
            Part(0.0),
            {"a": tf.Variable(0), "b": tf.Variable([0.0])},
        )
        net.set_weights([each * hvd.rank() for each in net.get_weights()])
        found = hvdlite.load(path, net=net, optimizer=optimizer, part=part, several=several)
        assert found == {"best": 0.5, "history": [(1, 2.0)]}
        assert part.weight.numpy().tolist() == [np.float32(tf.cast(0.1, tf.bfloat16).numpy())] * 2
        assert several["a"].numpy() == 3 and several["b"].numpy() == 1.5
        train(net, optimizer, 3)
        values = [np.array(each.numpy()) for each in [*net.weights, *optimizer.variables]]
        assert all(map(np.array_equal, values, wanted))
        require_same_bits(values)
        lonely = OPTIMIZERS["Adam"]()
        require_error(ValueError, lambda: hvd.load(path, optimizer=lonely), "optimizer has no state yet", "build(")
        require_error(
            ValueError, lambda: hvd.load(path, part=[tf.Variable([1.0])]), "part: ", "[1], and [2] in the file"
        )
        hvd.barrier()
