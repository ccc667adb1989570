"""Horovod's callbacks in fit, saving and loading, and the proof that ranks train together."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite.tensorflow
import hvdlite.tensorflow.keras as hvd
from hvdlite import HvdliteError, MismatchError
from hvdlite.gradients.registry import registry
from tests.parallel.common import last, require_error, require_same_bits
from tests.parallel.keras_common import (
    BATCH,
    STEPS,
    WIDTH,
    alone,
    both,
    data,
    fit,
    model,
    require_close,
    require_job_metrics,
    require_layers_that_follow,
    share,
    weights,
)

SIZES = (2,)


def random_model() -> Any:
    """Return a model with different weights on each rank."""
    built = model()
    for variable in built.trainable_variables:
        variable.assign(variable + hvd.rank())
    return built


def train(trained: Any, callbacks: list[Any], optimizer: Any = None, epochs: int = 2, **arguments: Any) -> Any:
    optimizer = optimizer or hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    trained.compile(optimizer, "mse", **{"metrics": ["mae"], **arguments})
    x, y = data()
    x, y = x[share()], y[share()]
    return trained.fit(
        x, y, batch_size=BATCH // hvd.size(), epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    )


def check_broadcast_at_the_beginning() -> None:
    """Ranks that start with different weights train like rank 0 alone, from the first step on."""
    expected = alone(lambda: weights(fit(keras.optimizers.SGD(0.05, momentum=0.9))))
    trained = random_model()
    train(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    require_close(weights(trained), expected, "broadcast")


def check_what_a_callback_restores_afterwards() -> None:
    """One rank's callback restores weights when training begins; weights also change between two fits."""

    class Restore(keras.callbacks.Callback):
        def on_train_begin(self, logs: Any = None) -> None:
            for variable in self.model.trainable_variables:
                variable.assign(variable + 1.0)

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    trained = model()
    train(trained, callbacks + [Restore()] * (hvd.rank() == 0))
    require_same_bits(weights(trained))
    for again in (random_model(), trained):
        for variable in again.trainable_variables:
            variable.assign(variable + hvd.rank())
        train(again, callbacks)
        require_same_bits(weights(again))


def check_attaching_after_a_fit() -> None:
    """hvdlite replaces the training step that Keras compiled before the optimizer was distributed."""
    trained = model()
    train(trained, [], keras.optimizers.SGD(0.05))
    hvd.DistributedOptimizer(trained.optimizer)
    x, y = data()
    trained.fit(x[share()], y[share()], batch_size=BATCH // hvd.size(), verbose=0,
                callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])  # fmt: skip
    require_same_bits(weights(trained))


def check_a_train_step_with_variables_of_its_own() -> None:
    """The user's train_step builds the optimizer, with a variable that the model does not know."""

    class Scaled(keras.Sequential):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x) * self.scale - y) ** 2)
            variables = [*self.trainable_variables, self.scale]
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    trained = Scaled(random_model().layers)
    trained.__dict__["scale"] = keras.Variable(1.0)
    train(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], metrics=None)
    require_same_bits([*weights(trained), np.asarray(trained.scale)])


def check_ranks_with_other_numbers_of_steps() -> None:
    x, y = data()
    rows = BATCH * (2 if last() else 3)
    trained = model()
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    require_error(HvdliteError, lambda: trained.fit(x[:rows], y[:rows], batch_size=BATCH, verbose=0, callbacks=callbacks),
                  "steps in an epoch", "by rank: 3, 2", "[HVD310]")  # fmt: skip


def check_a_rank_that_stops_early() -> None:
    """A metric of one rank that stops this rank is an error; with an averaged metric all ranks stop."""

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.model.stop_training = logs["mine"] > 0.4

    class Mine(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["mine"] = float(last())

    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    if hvd.size() > 1:
        require_error(HvdliteError, lambda: train(model(), [broadcast, Mine(), Stop()]), "rank 0 begins epoch 2",
                      f"rank {hvd.size() - 1} stops", "MetricAverageCallback")  # fmt: skip
    trained = model()
    train(trained, [broadcast, Mine(), hvd.callbacks.MetricAverageCallback(), Stop()])
    assert len(trained.history.epoch) == (1 if hvd.size() == 2 else 2)


def check_a_rank_that_ends_an_epoch_early() -> None:
    """A rank ends an epoch early (TerminateOnNaN, a shorter generator): an error, after which all ranks can train."""

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2 and last()

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    trained, ours = model(), MismatchError if last() else tf.errors.OpError  # TensorFlow reports an error inside a step
    end = f"rank {hvd.size() - 1} came to the end of epoch 1, while rank 0 went on"
    require_error(ours, lambda: train(trained, [*callbacks, Stop()]), end, "stop_training", "take(n)")
    x, y = data()
    batches = ((x[:3], y[:3]) for _ in range(2 - last()))
    require_error(ours, lambda: trained.fit(batches, verbose=0, callbacks=callbacks), end)
    train(trained, callbacks)
    require_same_bits(weights(trained))


def check_weights_that_drift_apart_are_found_out() -> None:
    """One rank trains with a different learning rate."""

    class Faster(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1 and last():
                self.model.optimizer.learning_rate = 0.2

    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Faster()]
    require_error(HvdliteError, lambda: train(model(), callbacks), "after epoch 2", "kernel", "local_variables=")


def check_accumulation_by_hand_is_not_training_alone() -> None:
    """An optimizer that is not the model's own steps at every second batch."""

    class Slow(keras.Sequential):
        def train_step(self, batch: Any) -> dict[str, Any]:
            x, y = batch
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x) - y) ** 2)
            variables = self.trainable_variables
            own.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    own = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    trained = Slow(random_model().layers)
    train(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], keras.optimizers.RMSprop(), metrics=None)
    require_same_bits(weights(trained))


def check_broadcast_of_a_model_built_by_its_first_batch() -> None:
    keras.utils.set_random_seed(hvd.rank())
    trained = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(2)])
    local = keras.Variable(float(hvd.rank()))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=local)
    train(trained, [callback])
    require_same_bits(weights(trained) + [np.asarray(v) for v in trained.optimizer.variables])
    assert float(local) == hvd.rank()


def check_local_variables_are_kept() -> None:
    trained = random_model()
    bias = trained.layers[-1].bias
    optimizer = keras.optimizers.SGD(0.0)
    optimizer = hvd.DistributedOptimizer(optimizer)
    before = np.array(bias)
    train(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[bias])], optimizer)
    np.testing.assert_array_equal(bias, before)
    require_error(
        ValueError, lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=["bias"]), "str"
    )


def check_a_layer_that_one_rank_alone_has() -> None:
    """After the layer of one rank, the shared variables have other indices."""
    dense = keras.layers.Dense
    shared, own = [dense(WIDTH, name="first"), dense(2, name="second")], dense(WIDTH, name="own")
    trained = keras.Sequential([keras.layers.Input((WIDTH,)), *([own] if hvd.rank() == 0 else []), *shared])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    if hvd.rank() == 0:
        optimizer.register_local_var(own)
        callback.register_local_var(own)
    train(trained, [callback], optimizer)
    require_same_bits([np.array(weight) for layer in shared for weight in layer.weights])


def check_training_alone_is_found_out() -> None:
    """The optimizer is not distributed, or train_step bypasses its apply."""
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    require_error(
        RuntimeError,
        lambda: train(model(), [callback], keras.optimizers.SGD(0.1)),
        "trains alone",
        "DistributedOptimizer",
    )

    class Other(keras.Sequential):
        def train_step(self, batch: Any) -> dict[str, Any]:
            variables = self.trainable_variables
            self.optimizer._backend_apply_gradients([keras.ops.ones_like(v) for v in variables], variables)
            return {}

    trained = Other(model().layers)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(trained.trainable_variables)
    before = weights(trained)
    require_error(RuntimeError, lambda: train(trained, [], optimizer), "not reduced over all ranks")
    for a, b in zip(before, weights(trained), strict=True):
        np.testing.assert_array_equal(a, b)


def check_an_optimizer_around_another() -> None:
    """An optimizer calls another one, but not its apply: only the outer optimizer can be distributed."""

    class Around(keras.optimizers.Optimizer):
        def __init__(self, inner: Any) -> None:
            super().__init__(learning_rate=0.05)
            self.inner_optimizer = inner

        def build(self, variables: Any) -> None:
            super().build(variables)
            self.inner_optimizer.build(variables)

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.inner_optimizer.update_step(gradient, variable, learning_rate)

    both(lambda: Around(keras.optimizers.SGD(0.05)))
    if hvd.size() > 1:
        inside = Around(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)))
        require_error(RuntimeError, lambda: train(model(), [], inside), "another optimizer around this one")


def check_an_optimizer_that_looks_at_gradients_first() -> None:
    class Sign(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            return super().apply_gradients([(keras.ops.sign(g), v) for g, v in grads_and_vars])

    both(lambda: Sign(0.05))


def check_layers_follow_what_is_broadcast() -> None:
    require_layers_that_follow(hvd)


def check_a_loop_with_a_list_of_callbacks() -> None:
    """A CallbackList reports neither epochs nor steps. Scripts may also train in a strategy's scope."""
    mine = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    trained = random_model()
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    together = keras.callbacks.CallbackList(mine, model=trained)
    x, y = data()
    together.on_train_begin()
    for batch in range(2):
        trained.train_on_batch(x[share()], y[share()])
        together.on_train_batch_end(batch)
    together.on_train_end()
    require_same_bits(weights(trained))
    with tf.distribute.MirroredStrategy(["cpu:0"]).scope():
        trained = random_model()
        train(trained, mine)
    require_same_bits(weights(trained))


def check_hooks_of_batches_are_horovods() -> None:
    """Users' subclasses and loops call on_batch_begin and on_batch_end."""
    told: list[str] = []

    class Mine(hvd.callbacks.BroadcastGlobalVariablesCallback):
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            super().on_batch_end(batch, logs)
            told.append("end")

    class Rate(hvd.callbacks.LearningRateScheduleCallback):
        def on_batch_begin(self, batch: int, logs: Any = None) -> None:
            super().on_batch_begin(batch, logs)
            told.append("begin")

    trained = train(random_model(), [Mine(0), Rate(0.01, lambda epoch: 0.5)])
    assert told[:2] == ["begin", "end"] and len(told) % 2 == 0
    require_same_bits(weights(trained.model))
    assert abs(float(trained.model.optimizer.learning_rate) - 0.005) < 1e-7
    state = hvd.elastic.KerasState(trained.model, batch=0)
    for callback in (hvd.elastic.UpdateBatchStateCallback(state), hvd.elastic.CommitStateCallback(state)):
        callback.on_batch_end(7)
    state.batch = 0
    state.restore()
    assert state.batch == 7


def check_xla_is_settled() -> None:
    """With jit_compile=True ('auto' on machines with GPUs) the model trains without XLA."""
    expected = alone(lambda: weights(fit(keras.optimizers.SGD(0.05, momentum=0.9))))
    trained = model()
    train(trained, [hvd.callbacks.BroadcastGlobalVariablesCallback(0)], jit_compile=True)
    assert not trained.jit_compile
    require_close(weights(trained), expected, "jit_compile")


def check_metrics_are_averaged() -> None:
    callback = hvd.callbacks.MetricAverageCallback()
    history = train(model(), [callback]).history
    expected = alone(lambda: fit(keras.optimizers.SGD(0.05, momentum=0.9)).history.history["loss"])
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-4)
    logs: dict[str, Any] = {"loss": float(hvd.rank()), "b": 2.0 * hvd.rank()}
    callback.on_epoch_end(0, logs)
    mean = (hvd.size() - 1) / 2
    assert logs == {"loss": mean, "b": 2 * mean}
    logs = {"f1": np.array([0.0, 1.0]) + hvd.rank()}
    callback.on_epoch_end(0, logs)
    np.testing.assert_allclose(logs["f1"], [mean, 1 + mean])
    odd: dict[str, Any] = {"loss": 1.0} | ({"other": 1.0} if last() else {})
    require_error(HvdliteError, lambda: callback.on_epoch_end(0, odd), "other", "rank 0 has loss")


def check_metrics_weighted_by_samples() -> None:
    """Rank r of p has 12 (r + 1) samples, and validates with 4 (p - r)."""
    x, y = data()
    count, others = hvd.rank() + 1, hvd.size() - hvd.rank()
    trained = model()
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse")
    history = trained.fit(
        x[:12].repeat(count, 0), hvd.rank() + y[:12].repeat(count, 0), batch_size=12 * count, epochs=1, verbose=0,
        validation_data=(x[:4].repeat(others, 0), y[:4].repeat(others, 0) - hvd.rank()), shuffle=False,
        callbacks=[hvd.callbacks.MetricAverageCallback(weighted=True)],
    ).history  # fmt: skip

    def expected(rows: int, sign: int) -> float:
        losses = [np.mean((trained.predict(x[:rows], verbose=0) - y[:rows] - sign * r) ** 2) for r in range(hvd.size())]
        return float(np.average(losses, weights=(np.arange(hvd.size()) + 1)[::sign]))

    np.testing.assert_allclose(history["loss"], [expected(12, 1)], rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], [expected(4, -1)], rtol=1e-5)


class Rates(keras.callbacks.Callback):
    """Records the learning rate of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(self.model.optimizer.learning_rate))


def check_warm_up() -> None:
    """The rate rises from initial_lr / size in equal steps to initial_lr after two epochs."""
    rates, size = Rates(), hvd.size()
    warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2)
    history = train(model(), [warm, rates], epochs=3).history
    done = np.minimum((np.arange(3 * STEPS) + 1) / (2 * STEPS), 1)
    np.testing.assert_allclose(rates.seen, 0.1 / size * (done * (size - 1) + 1), rtol=1e-5)
    np.testing.assert_allclose(history["lr"], rates.seen[STEPS - 1 :: STEPS], rtol=1e-6)


def check_warm_up_ends_at_the_rate() -> None:
    """So it does when callbacks see several steps as one, and within an epoch."""
    for epochs, compiled in ((1, {"steps_per_execution": STEPS}), (1.5, {}), (0.5, {})):
        warm = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=epochs)
        history = train(model(), [warm], epochs=3, **compiled).history
        np.testing.assert_allclose(history["lr"][-1], 0.1, rtol=1e-6)
        assert max(history["lr"]) < 0.1001, history["lr"]


def check_schedule() -> None:
    rates = Rates()
    schedules = [
        hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5, start_epoch=1, end_epoch=3),
        hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 2.0, start_epoch=3),
    ]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    train(model(), [*schedules, rates], optimizer, epochs=4)
    np.testing.assert_allclose(rates.seen[::STEPS], [0.1, 0.1, 0.05, 0.2], rtol=1e-6)
    require_error(ValueError, lambda: hvd.callbacks.LearningRateScheduleCallback(None, 0.5), "initial_lr")


def check_momentum_is_corrected() -> None:
    """With gradients of 1 and momentum m: v = -lr, then v' = m (lr'/lr) v - lr'."""
    variable = keras.Variable(np.zeros(1, np.float32))
    optimizer = keras.optimizers.SGD(0.1, momentum=0.5)
    optimizer.apply([np.ones(1, np.float32)], [variable])
    callback = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 10.0)
    trained = model()
    trained.compile(optimizer, "mse")
    callback.set_model(trained)
    callback.set_rate(0)
    optimizer.apply([np.ones(1, np.float32)], [variable])
    np.testing.assert_allclose(variable, [-0.1 + 0.5 * 10 * -0.1 - 1.0], rtol=1e-6)
    optimizer = keras.optimizers.RMSprop(0.1, momentum=0.5)
    optimizer.apply([np.ones(1, np.float32)], [variable])
    trained.compile(optimizer, "mse")
    (buffer,) = optimizer._momentums
    before = np.array(buffer)
    callback.set_rate(0)
    np.testing.assert_allclose(buffer, 10 * before, rtol=1e-6)
    assert before.any()


def check_save_and_load() -> None:
    """A model saved while distributed loads without hvdlite; with hvdlite it trains on with the restored state."""
    trained = model()
    train(trained, [], hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        trained.save(path)
        loaded = hvd.load_model(path)
        require_close(weights(loaded), weights(trained), "loaded", 0)
        assert type(loaded.optimizer) is keras.optimizers.Adam and int(loaded.optimizer.iterations) == 2 * STEPS
        x, y = data()
        for each in (trained, loaded):
            each.fit(x[share()], y[share()], batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
            require_same_bits(weights(each))
        require_close(weights(loaded), weights(trained), "trained on", 0)
        if hvd.rank() == 0:
            code = f"import sys, keras; m = keras.models.load_model({str(path)!r}); assert m.optimizer.iterations == {2 * STEPS}; assert 'hvdlite' not in sys.modules"
            subprocess.run([sys.executable, "-c", code], check=True)
        require_error(ValueError, lambda: hvd.load_model(path, legacy_opts=True), "legacy")


def check_load_a_model_with_an_optimizer_of_ones_own() -> None:
    """Horovod's scripts pass a function that returns a distributed optimizer; Keras 3 refuses it."""

    class Mine(keras.optimizers.Adam):
        pass

    trained = model()
    trained.compile(Mine(0.01), "mse")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        trained.save(path)
        for known in ({"custom_objects": {"Mine": Mine}}, {"custom_optimizers": [Mine]}):
            assert type(hvd.load_model(path, **known).optimizer) is Mine
        try:
            hvd.load_model(path, custom_objects={"Mine": lambda **settings: hvd.DistributedOptimizer(Mine(**settings))})
        except ValueError as error:
            assert "its class itself" in error.__notes__[-1]
        else:
            raise AssertionError("nothing was raised")


def check_best_model_checkpoint() -> None:
    checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    require_error(ValueError, lambda: train(model(), [checkpoint]), "filepath")
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.filepath = str(Path(folder) / "best.keras")
        trained = model()
        train(trained, [checkpoint], epochs=3)
        losses = [trained.evaluate(*data(), verbose=0)[0]]
        losses.append(keras.models.load_model(checkpoint.filepath).evaluate(*data(), verbose=0)[0])
        np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)  # the last model was the best


def check_local_embedding() -> None:
    """The sparse gradient of a local embedding is divided, in fit and with a tape."""
    embedding = keras.layers.Embedding(3, 2, embeddings_initializer="zeros")
    trained = keras.Sequential([keras.layers.Input((1,)), embedding, keras.layers.Flatten()])
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(1.0), local_layers=[embedding])
    trained.compile(optimizer, lambda y, found: keras.ops.sum(found, -1))
    trained.fit(np.full((1, 1), hvd.rank()), np.zeros((1, 2)), verbose=0)
    expected = np.zeros((3, 2))
    expected[hvd.rank()] = -1 / hvd.size()
    np.testing.assert_allclose(embedding.embeddings, expected)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(trained(np.full((1, 1), hvd.rank())))
    tape = hvdlite.tensorflow.PartialDistributedGradientTape(tape, local_layers=embedding)
    (found,) = tape.gradient(loss, [embedding.embeddings.value])
    np.testing.assert_allclose(tf.convert_to_tensor(found), -expected)


def check_wrong_arguments() -> None:
    sgd = keras.optimizers.SGD(0.1)
    for call, kind, words in (
        (lambda: hvd.DistributedOptimizer("adam"), (TypeError, ValueError), "optimizer"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.Adam), (TypeError, ValueError), "optimizer"),
        (lambda: hvd.DistributedOptimizer(model()), (TypeError, ValueError), "optimizer"),
        (lambda: hvd.DistributedOptimizer(sgd, hvd.Compression.fp16), TypeError, "compression="),  # type: ignore[arg-type]
        (lambda: hvd.DistributedOptimizer(sgd, compression="fp16"), ValueError, "hvd.Compression.fp16"),
        (lambda: hvd.DistributedOptimizer(sgd, gradient_predivide_factor=0), ValueError, "above 0"),
        (lambda: hvd.DistributedOptimizer(sgd, process_set=3), TypeError, "hvd.ProcessSet"),  # type: ignore[arg-type]
        (lambda: hvd.DistributedOptimizer(sgd).register_local_var("bias"), ValueError, "str"),
        (lambda: hvd.callbacks.BroadcastGlobalVariablesCallback("x"), ValueError, "root_rank='x' is no rank"),  # type: ignore[arg-type]
        (lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(-1), ValueError, "root_rank=-1 is no rank"),
        (lambda: hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=-2), ValueError, "warmup_epochs=-2"),
    ):
        require_error(kind, call, words)


def check_local_layers() -> None:
    """Gradients of local layers stay the rank's own; gradients of other layers are averaged."""
    for scale in (True, False):
        trained = model()
        head = trained.layers[-1]
        optimizer = keras.optimizers.SGD(1.0)
        hvd.PartialDistributedOptimizer(optimizer, local_layers=head, scale_local_gradients=scale)
        variables = trained.trainable_variables
        before = [np.array(v) for v in variables]
        optimizer.apply([keras.ops.ones_like(v) * (hvd.rank() + 1.0) for v in variables], variables)
        moved = [float(np.mean(b - np.array(v))) for b, v in zip(before, variables, strict=True)]
        own = (hvd.rank() + 1) / (hvd.size() if scale else 1)
        np.testing.assert_allclose(moved, [(hvd.size() + 1) / 2] * 2 + [own] * 2, rtol=1e-6)
    for given, why in (("head", "layers"), (keras.layers.Dense(2, name="unbuilt"), "no weights yet in unbuilt")):
        call = partial(hvd.PartialDistributedOptimizer, keras.optimizers.SGD(1.0), local_layers=given)
        require_error(ValueError, call, why)


def check_values() -> None:
    rank, size = hvd.rank(), hvd.size()
    np.testing.assert_allclose(hvd.allreduce(float(rank)), (size - 1) / 2)
    np.testing.assert_allclose(
        hvd.allreduce(np.full(3, rank, "float32"), op=hvd.Sum, compression=hvd.Compression.fp16), [sum(range(size))] * 3
    )
    np.testing.assert_allclose(hvd.allgather([float(rank)]), range(size))
    np.testing.assert_allclose(hvd.broadcast([float(rank)], 1), [1.0])
    np.testing.assert_allclose(hvd.reducescatter(np.ones((size, 2), "float32"), op=hvd.Sum), [[size] * 2])


class Pair(keras.Model):
    """Two networks with an optimizer each, like a GAN; the model itself is never `built`."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(hvd.rank())
        self.parts = [keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(2)]) for _ in range(2)]

    def compile(self, first: Any, second: Any) -> None:
        super().compile()
        self.first, self.second = first, second

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        for part, optimizer in zip(self.parts, (self.first, self.second), strict=True):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((part(x) - y) ** 2)
            variables = part.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"loss": loss}


def pair(first: Any, second: Any, rows: Any = None, batch: int = BATCH, begin: Any = lambda: None) -> Any:
    trained, (x, y) = Pair(), data()
    trained.compile(first, second)
    for part, optimizer in zip(trained.parts, (first, second), strict=True):
        optimizer.build(part.trainable_variables)
    begin()
    callbacks = [] if rows is None else [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    rows = slice(None) if rows is None else rows
    trained.fit(x[rows], y[rows], batch_size=batch, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    return trained


def check_a_model_with_two_optimizers() -> None:
    """The two networks train like one process from the first step. An optimizer that is not distributed is an
    error. State restored on rank 0 alone reaches all ranks."""

    def momentum() -> Any:
        return keras.optimizers.SGD(0.05, momentum=0.9)

    def distributed() -> Any:
        return hvd.DistributedOptimizer(momentum())

    expected = alone(lambda: weights(pair(momentum(), momentum())))
    require_close(weights(pair(distributed(), distributed(), share(), BATCH // hvd.size())), expected, "two optimizers")

    first, second = distributed(), distributed()

    def restore() -> None:
        for variable in (*first.variables, *second.variables):
            if hvd.rank() == 0 and "momentum" in variable.path:
                variable.assign(np.ones(variable.shape, np.float32))

    require_same_bits(weights(pair(first, second, share(), BATCH // hvd.size(), restore)))
    if hvd.size() > 1:
        require_error(
            HvdliteError, lambda: pair(distributed(), momentum(), share()[hvd.rank() :], 2), "differ", "variable 2"
        )


def check_weights_that_a_process_set_trains_may_differ() -> None:
    """Only the members of the set have the optimizer."""
    trained = random_model()
    trained.compile("sgd", "mse")
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(trained)
    require_error(HvdliteError, lambda: callback.on_epoch_end(0), "kernel (variable 0)")
    if last():
        registry.in_process_sets.extend(trained.trainable_variables)
    callback.on_epoch_end(0)


def check_backups_on_one_rank_are_refused_with_the_cure() -> None:
    """BackupAndRestore resumes where one rank stopped; with one folder per rank, all ranks resume."""

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    x, y = np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)
    for everywhere in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            net = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
            net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")

            def fit(*more: Any) -> Any:
                backup = keras.callbacks.BackupAndRestore(f"{folder}/backup/{hvd.rank()}")
                kept = [backup] if everywhere or hvd.rank() == 0 else []
                callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *kept, *more]
                return net.fit(x, y, epochs=3, verbose=0, callbacks=callbacks)

            require_error(KeyboardInterrupt, lambda: fit(Interrupt()))
            if everywhere:
                assert fit().epoch == [2]
            else:
                require_error(HvdliteError, fit, "rank 0 begins epoch 3, rank 1 begins epoch 1",
                              'keras.callbacks.BackupAndRestore(f"backup/{hvd.rank()}")')  # fmt: skip


def check_job_metrics() -> None:
    require_job_metrics()
