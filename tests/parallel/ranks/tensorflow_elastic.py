"""Elastic states of TensorFlow and Keras, and training through an error: traced functions work afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as hvd_keras
from hvdlite.elastic import start_again
from hvdlite.errors import HorovodInternalError
from tests.parallel.common import at_sizes, last, require_error, require_same_bits
from tests.parallel.keras_common import WIDTH, model

SIZES = (1, 2, 3)
v1 = tf.compat.v1


def batch() -> tuple[np.ndarray, np.ndarray]:
    """Return this rank's batch."""
    generator = np.random.default_rng(hvd.rank())
    return generator.normal(size=(8, WIDTH)).astype("f4"), generator.normal(size=(8, 2)).astype("f4")


def compiled(**how: Any) -> Any:
    """Return a compiled model, the same on all ranks."""
    trained = model()
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    trained.compile(optimizer, loss="mse", jit_compile=False, **how)
    return trained


class FailOnce(keras.callbacks.Callback):
    """Raises an error once, in the given epoch: on every rank, or on the last rank while others train."""

    def __init__(self, epoch: int, everywhere: bool, failed: list[int], state: Any) -> None:
        super().__init__()
        self.epoch, self.everywhere, self.failed, self.state = epoch, everywhere, failed, state

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.state.epoch == self.epoch and not self.failed:
            self.failed.append(epoch)
            if self.everywhere or last() or hvd.size() == 1:
                raise HorovodInternalError("as if something had failed")


def check_fit_through_an_error_is_fit_without_one() -> None:
    """Weights and momentum agree to the bit. On ranks that wait in a step, TensorFlow reports the error as its own."""
    x, y = batch()
    plain = compiled()
    plain.fit(x, y, batch_size=4, epochs=5, shuffle=False, verbose=0)
    for everywhere, eagerly in ((True, False), (False, False), (False, True)):
        trained, failed = compiled(run_eagerly=eagerly), list[int]()
        state: Any = hvd_keras.elastic.KerasState(trained, epoch=0, batch=0)

        @hvd_keras.elastic.run
        def train(state: Any, everywhere: bool = everywhere, failed: list[int] = failed) -> None:
            state.model.fit(x, y, batch_size=4, epochs=5 - state.epoch, shuffle=False, verbose=0, callbacks=[
                hvd_keras.elastic.UpdateBatchStateCallback(state), hvd_keras.elastic.UpdateEpochStateCallback(state),
                hvd_keras.elastic.CommitStateCallback(state, 100), FailOnce(3, everywhere, failed, state)])  # fmt: skip

        train(state)
        assert failed and (state.epoch, state.batch) == (5, 0)
        found = [value.numpy() for value in state.variables()]
        expected = [value.numpy() for value in (*plain.weights, *plain.optimizer.variables)]
        close = 1e-6 if eagerly else 0  # eager mode computes in another order
        assert all((abs(a - b) <= close).all() for a, b in zip(found, expected, strict=True))
        require_same_bits(found)


def check_passes_before_a_restart_or_a_restore_do_not_count() -> None:
    trained = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    state = hvd_keras.elastic.KerasState(trained, optimizer)
    w = trained.weights[0]
    for forget in (start_again, state.restore):
        w.assign([[0.0]])
        optimizer.apply([tf.constant([[8.0]])], [w])
        forget()
        for expected in (0.0, -2.0):
            optimizer.apply([tf.constant([[1.0]])], [w])
            assert float(w.numpy()[0, 0]) == expected


def check_a_traced_tape_goes_on() -> None:
    """A tf.function with collectives and a tape is traced before the error and used after it."""
    weight = tf.Variable([1.0, 2.0])

    @tf.function
    def step(scale: tf.Tensor) -> tf.Tensor:
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(scale * weight**2)
        weight.assign_sub(0.1 * tape.gradient(loss, [weight])[0])
        return hvd.allreduce(loss, name="loss")

    state = hvd.elastic.TensorFlowState([weight], step=0)
    six_steps_with_an_error(state, lambda: step(tf.constant(float(hvd.rank()))))
    require_six_steps(weight.numpy())


def six_steps_with_an_error(state: Any, step: Callable[[], Any]) -> None:
    """Train six steps. In the fifth step the last rank fails once, and all ranks return to the second."""
    failed: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < 6:
            if state.step == 4 and not failed:
                failed.append(1)
                if last() or hvd.size() == 1:
                    raise HorovodInternalError("as if something had failed")
            step()
            state.step += 1
            if state.step == 2:
                state.commit()

    train(state)
    assert failed


def require_six_steps(weight: np.ndarray) -> None:
    """Require the result of six steps from [1, 2]: each step subtracts 0.2 times the ranks' average number."""
    mean = (hvd.size() - 1) / 2
    expected = np.array([1.0, 2.0]) * (1 - 0.2 * mean) ** 6
    assert np.abs(weight - expected).max() < 1e-5
    require_same_bits([weight])


def check_a_session_goes_on() -> None:
    """The script keeps only the operation of a TF1 optimizer's step."""
    with tf.Graph().as_default(), v1.Session() as session:
        weight = v1.get_variable("w", initializer=np.array([1.0, 2.0], np.float32))
        loss = tf.reduce_sum(v1.placeholder_with_default(float(hvd.rank()), ()) * weight**2)
        step = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1)).minimize(loss)
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, step=0)
        six_steps_with_an_error(state, lambda: session.run(step))
        require_six_steps(session.run(weight))


@at_sizes(2, 3, 4)
def check_a_set_of_one_goes_on() -> None:
    """An optimizer without anything to reduce, with several passes per step."""
    process_set = hvd.ProcessSet([0])
    hvd.shutdown()
    hvd.init(process_sets=[process_set])
    weight = keras.Variable([4.0])
    optimizer = hvd_keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0), backward_passes_per_step=2, process_set=process_set
    )
    failed: list[int] = []

    @hvd_keras.elastic.run
    def train(state: Any) -> None:
        """Run three passes, with an error after the first pass, which then does not count."""
        for _ in range(1 if not failed else 2):
            optimizer.apply([tf.ones(1)], [weight])
        if not failed:
            failed.append(1)
            raise HorovodInternalError("as if something had failed")

    train(hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank))
    assert float(weight.numpy()[0]) == 2.0
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    hvd.remove_process_set(process_set)
    del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]
    start_again()  # all ranks, without the optimizer
    hvd.shutdown()
    hvd.init()


def check_other_errors_of_tensorflow_pass() -> None:
    """So they do after a graph has raised an error of hvdlite that the function caught."""

    @tf.function
    def fail() -> tf.Tensor:
        return tf.debugging.assert_equal(1, 2)

    @tf.function
    def disagree() -> tf.Tensor:
        return hvd.allreduce(tf.ones(3 if last() else 4), name="odd")

    @hvd.elastic.run
    def train(state: Any) -> None:
        if hvd.size() > 1:
            require_error(tf.errors.FailedPreconditionError, disagree, "odd")
        fail()

    state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])
    require_error(tf.errors.InvalidArgumentError, lambda: train(state))


def check_a_mismatch_in_a_graph_is_survived() -> None:
    """All ranks get TensorFlow's error, and return to the last commit."""
    lengths = iter([4 if last() else 3, 3])

    @hvd.elastic.run
    def train(state: Any) -> float:
        length = next(lengths)
        return float(tf.function(lambda: tf.reduce_sum(hvd.allreduce(tf.ones(length), name="odd")))())

    assert train(hvd.elastic.TensorFlowState([tf.Variable(1.0)])) == 3.0


def check_tensorflow_state() -> None:
    variable = tf.Variable([float(hvd.rank())])
    state = hvd.elastic.TensorFlowState(variables=[variable], epoch=hvd.rank())
    variable.assign([9.0])
    state.epoch = 9
    state.restore()
    assert variable.numpy() == hvd.rank() and state.epoch == hvd.rank()
    state.sync()
    assert variable.numpy() == 0 and state.epoch == 0
    require_error(ValueError, lambda: hvd.elastic.TensorFlowState(), "variables")


def check_tensorflow_state_in_a_session() -> None:
    with tf.Graph().as_default(), v1.Session() as session:
        variable = v1.get_variable("w", initializer=np.full(3, 5.0 + hvd.rank(), np.float32))
        session.run(v1.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(step=hvd.rank())  # takes the surrounding session
        variable.load(np.zeros(3), session)
        state.restore()
        assert (session.run(variable) == 5 + hvd.rank()).all()
        state.sync()
        assert (session.run(variable) == 5).all() and state.step == 0


def check_keras_state() -> None:
    """The state has weights, momentum and step count; it builds an optimizer that is not built."""
    trained = compiled()
    state = hvd.elastic.TensorFlowKerasState(trained, epoch=hvd.rank())
    kept = [value.numpy() for value in state.variables()]
    assert len(kept) > len(trained.weights) + len(trained.trainable_weights)
    x, y = batch()
    trained.fit(x, y, epochs=1, verbose=0)
    state.restore()
    assert all((value.numpy() == before).all() for value, before in zip(state.variables(), kept, strict=True))
    trained.weights[0].assign(trained.weights[0] + float(hvd.rank()))
    state.sync()
    assert (trained.weights[0].numpy() == kept[0]).all() and state.epoch == 0
    require_error(ValueError, lambda: hvd_keras.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])), "build")


def check_a_layer_that_comes_after_the_commit() -> None:
    """The new layer stays as it is. Other weights and the optimizer's state return, though their indices changed."""
    trained = compiled()
    state = hvd.elastic.TensorFlowKerasState(trained)
    kept = [(variable, variable.numpy()) for variable in state.variables()]
    trained.add(keras.layers.Dense(3))
    for variable in state.variables():
        variable.assign(variable + tf.ones_like(variable))
    late = [weight.numpy() for weight in trained.layers[-1].weights]
    state.restore()
    assert all((variable.numpy() == value).all() for variable, value in kept)
    assert all((w.numpy() == value).all() for w, value in zip(trained.layers[-1].weights, late, strict=True))


def check_callbacks_commit() -> None:
    """They commit after every second batch and at the end of each epoch."""
    commits: list[tuple[int, int]] = []

    class Noting(hvd_keras.elastic.ObjectState):
        def commit(self) -> None:
            commits.append((self.epoch, self.batch))

    x, y = batch()
    state = Noting(hvd.broadcast_object, hvd.rank, epoch=7, batch=0)
    compiled().fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[
        hvd_keras.elastic.UpdateBatchStateCallback(state), hvd_keras.elastic.UpdateEpochStateCallback(state),
        hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2)])  # fmt: skip
    assert commits == [(7, 1), (7, 3), (8, 0), (8, 1), (8, 3), (9, 0)]
