"""Comparisons of the ranks' weights: different models are an error from the second step on, later a warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as keras_hvd
from hvdlite.gradients import replica_check, watched
from tests.parallel.common import last, logged, require_error, require_same_bits, restart
from tests.parallel.keras_common import WIDTH, fit, model, share, weights

v1: Any = tf.compat.v1


def own_model() -> Any:
    """Return a model with different weights on each rank."""
    trained = model()
    keras.utils.set_random_seed(hvd.rank())
    for variable in trained.trainable_variables:
        variable.assign(keras.random.normal(variable.shape))
    return trained


def refused(call: Callable[[], Any]) -> None:
    """Require that the call fails on every rank and names the cure; with one rank it succeeds."""
    if hvd.size() == 1:
        call()
        return
    require_error(tf.errors.FailedPreconditionError, call, "kernel (variable 0) and 3 more differ between", "rank 0",
                  "BroadcastGlobalVariablesCallback(0)", "broadcast_variables(model, root_rank=0)")  # fmt: skip


@contextmanager
def begin(rounds: int = 2) -> Iterator[None]:
    """Have the first comparison come after this number of rounds."""
    before, watched.BEGIN = watched.BEGIN, rounds
    restart()
    try:
        yield
    finally:
        watched.BEGIN = before


def check_fit_without_the_callback() -> None:
    for compiled in ({}, {"run_eagerly": True}, {"steps_per_execution": 3}):
        with begin():
            optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
            refused(lambda: fit(optimizer, share(), 3, own_model, **compiled))


def check_a_fit_with_the_callback_cares_for_itself_alone() -> None:
    """A fit with the callback does not stop comparisons of another model's loop, before or after it."""
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
        train(own_model(), False, "never")  # fit has not called the failed callback's on_train_end


def check_tape() -> None:
    """A loop that never broadcasts fails. A loop that broadcasts before or after the first step trains."""
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
    """Two models that share an exchange are not compared on any rank, even if one rank traces the step again."""
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
    """The broadcast may follow several rounds of the first batch; under the callback, any number."""
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
        unbuilt = keras.Sequential(
            [keras.layers.Dense(1, kernel_initializer=keras.initializers.RandomNormal(seed=hvd.rank()))]
        )
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
    """If one rank's learning rate changes, rank 0 warns once, and training continues."""
    with begin():
        later()


def later() -> None:
    rounds, replica_check.ROUNDS = replica_check.ROUNDS, 5
    rates = [0.01]
    trained = model()
    step = stepper(trained, lambda: rates[-1])
    with logged() as told:
        for number in range(17):
            if number == 7 and last():
                rates.append(0.02)
            step()
    replica_check.ROUNDS = rounds
    assert len(told) == (hvd.size() > 1 and hvd.rank() == 0), told
    assert all("after 13 steps" in text and "kernel (variable 0) and" in text for text in told), told


def check_when_the_job_ends() -> None:
    """A difference that appears after the last comparison, or before the first, is a warning at shutdown."""
    for different in (True, False):
        restart()
        trained = model()
        step = stepper(trained)
        for _ in range(3):
            step()
        trained.trainable_variables[-1].assign_add([float(last() and different)] * 2)
        with logged() as told:
            hvd.shutdown()
        hvd.init()
        assert len(told) == (different and hvd.size() > 1 and hvd.rank() == 0), told
        assert all("GradientTape: when the job ended, after 3 steps" in text and "variable 3" in text for text in told)


def train_v1(rounds: int, graph: Any = None, **arguments: Any) -> int:
    """Run a TF1 script in which each rank begins with different weights. Returns the number of finished steps."""
    made = 0
    with tf.Graph().as_default() if graph is None else graph, v1.Session() as session:
        w = v1.get_variable("w", initializer=np.full(3, float(hvd.rank()), np.float32), use_resource=graph is None)
        sgd = v1.train.GradientDescentOptimizer(0.01)
        optimizer = hvd.DistributedOptimizer(sgd, **arguments)
        step = optimizer.minimize(tf.reduce_sum(w * float(1 + hvd.rank())))
        session.run(v1.global_variables_initializer())
        for _ in range(rounds):
            session.run(step)
            made += 1
    return made


def refused_in_session(call: Callable[[], Any]) -> None:
    """Require that the call fails on every rank and names the cure; with one rank it succeeds."""
    if hvd.size() == 1:
        call()
        return
    require_error(tf.errors.FailedPreconditionError, call, "w:0 (variable 0) differs between", "rank 0",
                  "BroadcastGlobalVariablesHook(0)", "broadcast_global_variables(0)")  # fmt: skip


def check_sessions() -> None:
    """The hundredth step compares, for both kinds of variables, and with several passes per step."""
    restart()
    assert train_v1(99) == 99
    refused_in_session(lambda: train_v1(150))
    with begin(rounds=3):
        assert train_v1(2) == 2
        refused_in_session(lambda: train_v1(3))
        refused_in_session(lambda: train_v1(3, tf.Graph().as_default()))
        assert train_v1(5, backward_passes_per_step=2) == 5
        refused_in_session(lambda: train_v1(6, backward_passes_per_step=2))
        assert train_v1(10, replica_check="off") == 10
        with logged() as told:
            assert train_v1(10, replica_check="warn") == 10
        assert len(told) == (hvd.size() > 1 and hvd.rank() == 0) and all("w:0 (variable 0)" in text for text in told)


def check_sessions_whose_hook_comes_too_early() -> None:
    """A hook that runs after the broadcast restores different weights on each rank."""

    class Restore(v1.train.SessionRunHook):
        def begin(self) -> None:
            self.restore = v1.global_variables()[0].assign(np.full(3, float(hvd.rank())))

        def after_create_session(self, session: Any, coord: Any) -> None:
            session.run(self.restore)

    def train(*hooks: Any) -> None:
        with tf.Graph().as_default():
            w = v1.get_variable("w", initializer=np.full(3, float(hvd.rank()), np.float32))
            optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.01))
            step = optimizer.minimize(tf.reduce_sum(w * float(1 + hvd.rank())))
            with v1.train.MonitoredTrainingSession(hooks=hooks) as session:
                for _ in range(5):
                    session.run(step)

    with begin(rounds=3):
        refused_in_session(lambda: train(hvd.BroadcastGlobalVariablesHook(0), Restore()))
        train(Restore(), hvd.BroadcastGlobalVariablesHook(0))


def check_warned_instead() -> None:
    """`replica_check`, as an argument or a setting, turns the error of a tape or a fit into a warning."""
    with begin():
        trained = own_model()
        with logged() as told:
            for _ in range(4):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(trained(np.ones((2, WIDTH), np.float32)) ** 2)
                hvd.DistributedGradientTape(tape, replica_check="warn").gradient(loss, trained.trainable_variables)
        assert len(told) == (hvd.size() > 1 and hvd.rank() == 0) and all("kernel (variable 0)" in text for text in told)
        fit(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), replica_check="off"), share(), 3, own_model)
        require_error(
            ValueError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), replica_check="loud"), "'loud'"
        )


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
