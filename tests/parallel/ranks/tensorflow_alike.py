"""Ranks that would train different models without a word: an error from the second step on, later a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as keras_hvd
from hvdlite import alike, exchange
from tests.parallel.common import last, logged, require_error, require_same_bits, restart
from tests.parallel.keras_common import WIDTH, fit, model, share, weights


def own_model() -> Any:
    """Other weights on each rank."""
    trained = model()
    keras.utils.set_random_seed(hvd.rank())
    for variable in trained.trainable_variables:
        variable.assign(keras.random.normal(variable.shape))
    return trained


def refused(call: Callable[[], Any]) -> None:
    """The call fails on every rank, and says what to do; or does not, on a rank that is alone."""
    if hvd.size() == 1:
        call()
        return
    require_error(tf.errors.FailedPreconditionError, call, "kernel (variable 0) and 3 more differ between", "rank 0",
                  "BroadcastGlobalVariablesCallback(0)", "broadcast_variables(model, root_rank=0)")  # fmt: skip


@contextmanager
def begin(rounds: int = 2) -> Iterator[None]:
    """Compare after so many rounds."""
    before, exchange.BEGIN = exchange.BEGIN, rounds
    restart()
    try:
        yield
    finally:
        exchange.BEGIN = before


def check_fit_without_the_callback() -> None:
    for compiled in ({}, {"run_eagerly": True}, {"steps_per_execution": 3}):
        with begin():
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
            refused(lambda: fit(optimizer, share(), 3, own_model, **compiled))  # noqa: B023


def check_a_fit_with_the_callback_cares_for_itself_alone() -> None:
    """Another model's loop is looked at, before it and behind it."""
    with begin():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        callback = keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        trained = own_model()
        trained.compile(optimizer, "mse")
        rows = np.ones((8, WIDTH)), np.ones((8, 2))
        trained.fit(*rows, batch_size=2, epochs=2, verbose=0, callbacks=[callback])
        train(own_model(), False, "never")

    def fail(batch: int, logs: Any) -> None:
        raise KeyError("of a user's own")

    failing = keras.callbacks.LambdaCallback(on_train_batch_begin=fail)
    with begin():
        require_error(KeyError, lambda: trained.fit(*rows, verbose=0, callbacks=[callback, failing]), "of a user's own")
        train(own_model(), False, "never")  # while that fit's callback has not heard that it is over


def check_tape() -> None:
    """A loop that never broadcasts, one that does before, and one that does after the first step."""
    for compiled in (False, True):
        for when in ("never", "before", "after the first"):
            with begin():
                train(own_model(), compiled, when)


def train(trained: Any, compiled: bool, when: str) -> None:
    step = stepper(trained)
    run = tf.function(step) if compiled else step

    def loop() -> None:
        for number in range(3):
            run()
            if number == 0 and when == "after the first":
                hvd.broadcast_variables(trained.variables, root_rank=0)

    if when == "before":
        hvd.broadcast_variables(trained.variables, root_rank=0)
    if when == "never":
        refused(loop)
        hvd.broadcast_variables(trained.variables, root_rank=0)
    loop()
    require_same_bits(weights(trained))


def check_two_models_with_the_same_names() -> None:
    """They share an exchange, and are not compared: no rank does so alone, though one traces a step again."""
    with begin():
        twins = [own_model(), own_model()]
        steps = [stepper(twin) for twin in twins]

        @tf.function
        def step(x: tf.Tensor) -> tf.Tensor:
            for each in steps:
                each()
            return x

        for number in range(4):
            step(tf.ones(1 + (last() and number == 2)))
            if number == 0:
                hvd.broadcast_variables([*twins[0].variables, *twins[1].variables], root_rank=0)
        require_same_bits([*weights(twins[0]), *weights(twins[1])])


def check_several_rounds_before_the_broadcast() -> None:
    """As a critic's, in the first batch; and under the callback any number."""
    hvd.shutdown()
    hvd.init()
    trained = own_model()
    step = stepper(trained)
    for number in range(20):
        step()
        if number == 9:
            hvd.broadcast_variables(trained.variables, root_rank=0)
    require_same_bits(weights(trained))
    with begin():
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        unbuilt = keras.Sequential([keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=hvd.rank()))])
        unbuilt.compile(optimizer, "mse", steps_per_execution=4)
        callbacks = [keras_hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        unbuilt.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=4, verbose=0, callbacks=callbacks)
        require_same_bits(weights(unbuilt))


def stepper(trained: Any, rate: Callable[[], float] = lambda: 0.01) -> Callable[[], None]:
    x = np.ones((2, trained.input_shape[1]), np.float32) * (hvd.rank() + 1)

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(trained(x) ** 2)
        tape = hvd.DistributedGradientTape(tape)
        for variable, grad in zip(
            trained.trainable_variables, tape.gradient(loss, trained.trainable_variables), strict=True
        ):
            variable.assign_sub(rate() * grad)

    return step


def check_later() -> None:
    """A rank whose learning rate changes is told of by rank 0, once, and training goes on."""
    with begin():
        later()


def later() -> None:
    rounds, alike.ROUNDS = alike.ROUNDS, 5
    rates = [0.01]
    trained = model()
    step = stepper(trained, lambda: rates[-1])
    with logged() as told:
        for number in range(17):
            if number == 7 and last():
                rates.append(0.02)
            step()
    alike.ROUNDS = rounds
    assert len(told) == (hvd.size() > 1 and hvd.rank() == 0), told
    assert all("after 10 rounds" in text and "kernel (variable 0) and" in text for text in told), told


def check_local_layers_may_differ() -> None:
    with begin():
        local_layers()


def local_layers() -> None:
    trained = own_model()
    head = trained.layers[-1]
    hvd.broadcast_variables(trained.layers[0].variables, root_rank=0)
    x = np.ones((2, trained.input_shape[1]), np.float32)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(trained(x) ** 2)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=head)
        tape.gradient(loss, trained.trainable_variables)
