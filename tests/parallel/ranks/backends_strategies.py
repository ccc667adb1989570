"""`DistributedOptimizer(strategy=...)` for Keras: what an optimizer does around its updates.

`test_keras_backends` runs these checks.
"""

from __future__ import annotations

import contextlib
import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from hvdlite.keras.attachment import attachment_of
from hvdlite.ops import Average, grouped_allreduce_
from hvdlite.strategies import Reach, Running, Site, Strategy
from tests.parallel.common import last, require_error, require_mismatch, require_threads_end, restart

with contextlib.suppress(ImportError):
    import tensorflow as tf

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported
WIDTH, BATCH = 6, 4
SGD, Adam = keras.optimizers.SGD, keras.optimizers.Adam


@dataclass(frozen=True)
class Averaging(Strategy):
    """Averages all weights after every so many updates."""

    every: int = 3
    state: bool = False

    def start(self, site: Site) -> Running:
        return Averager(self, site)

    @property
    def wants_state(self) -> bool:
        return self.state


class Averager(Running):
    def __init__(self, settings: Averaging, site: Site) -> None:
        self.settings, self.site, self.count = settings, site, 0
        self.log: list[str] = []
        self.names: list[str] = []

    def update_ends(self) -> bool:
        self.count += 1
        self.log.append("end")
        return self.count % self.settings.every == 0

    def after_update(self, weights: Sequence[Any], state: Mapping[str, Any]) -> bool:
        self.log.append("after")
        self.names = list(state)
        grouped_allreduce_([*weights, *state.values()], op=Average, name=self.site.name)
        return True

    def settle(self, weights: Sequence[Any]) -> None:
        self.log.append("settle")

    def moved(self) -> None:
        self.log.append("moved")

    def state(self) -> dict[str, Any]:
        return {"count": np.array(self.count), "a/b": np.arange(3.0)}

    def load(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])


@dataclass(frozen=True)
class PostLocal(Averaging):
    """Averages gradients in the first updates, then in every fifth within the host."""

    warmup: int = 3

    def reach(self, step: int) -> Reach:
        if step <= self.warmup:
            return Reach.EVERYONE
        return Reach.HOST if step % 5 == 0 else Reach.NONE

    @property
    def reaches(self) -> frozenset[Reach]:
        return frozenset(Reach)


@dataclass(frozen=True)
class Adding(Strategy):
    """Adds 1 plus the gradient to all weights before every second update."""

    def start(self, site: Site) -> Running:
        return Adder()


class Adder(Running):
    def __init__(self) -> None:
        self.count = 0

    def update_begins(self) -> bool:
        self.count += 1
        return self.count % 2 == 0

    def before_update(self, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight += 1 if gradient is None else 1 + gradient


def on(backend: str) -> bool:
    return bool(keras.backend.backend() == backend)


def running(optimizer: Any) -> Any:
    attachment = attachment_of(optimizer)
    assert attachment is not None and attachment.strategy is not None
    return attachment.strategy.running


def array(tensor: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tensor))


def model(seed: int = 1) -> Any:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(2)]
    return keras.Sequential([keras.layers.Input((WIDTH,)), *layers])


def data(steps: int, rank: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(hvd.rank() if rank is None else rank)
    x = rng.standard_normal((steps * BATCH, WIDTH)).astype(np.float32)
    return x, x[:, :2] - x[:, 2:4]


def weights(trained: Any) -> list[np.ndarray]:
    return [array(variable) for variable in trained.trainable_variables]


def equal(values: Any) -> bool:
    """Whether all ranks have the same bits."""
    everyones = hvd.allgather_object([np.asarray(each).tobytes() for each in values])
    return all(each == everyones[0] for each in everyones)


class AtBatches(keras.callbacks.Callback):
    """Notes after each batch whether all ranks have equal weights."""

    def __init__(self) -> None:
        super().__init__()
        self.equal: list[bool] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.equal.append(equal(weights(self.model)))


def fit(optimizer: Any, steps: int, trained: Any = None, **compiled: Any) -> tuple[Any, list[bool]]:
    trained, noted = trained or model(), AtBatches()
    if not trained.compiled:
        trained.compile(optimizer, "mse", **compiled)
    x, y = data(steps)
    trained.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[noted])
    return trained, noted.equal


def ways() -> list[dict[str, Any]]:
    """The ways in which the backend runs a step."""
    return [{}, {"run_eagerly": True}] if on("tensorflow") else [{}]


def check_weights_are_equal_after_every_third_step() -> None:
    for way in ways():
        optimizer = hvd.DistributedOptimizer(SGD(0.1, momentum=0.9), strategy=Averaging(3))
        _, found = fit(optimizer, 8, **way)
        assert found == [number % 3 == 0 for number in range(1, 9)], (way, found)
        assert running(optimizer).log.count("end") == 8 and running(optimizer).log.count("after") == 2


def check_several_steps_per_execution() -> None:
    if not on("tensorflow"):
        return
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(2))
    _, found = fit(optimizer, 10, steps_per_execution=4)
    assert found == [True, True, True], found  # after 4, 8 and 10 steps
    assert running(optimizer).log == ["end", "end", "after"] * 5
    once, _ = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(2)), 10)
    several, _ = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(2)), 10, steps_per_execution=4)
    for a, b in zip(weights(once), weights(several), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def check_every_step_equals_synchronous_training() -> None:
    for way in ways():
        local, _ = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(1)), 6, **way)
        synchronous, _ = fit(hvd.DistributedOptimizer(SGD(0.1)), 6, **way)
        for a, b in zip(weights(local), weights(synchronous), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def check_a_rank_alone_between_averages() -> None:
    """Between averages a rank trains as an optimizer that is not distributed."""
    own, _ = fit(hvd.DistributedOptimizer(Adam(0.01), strategy=Averaging(100)), 5)
    alone, _ = fit(Adam(0.01), 5)
    for a, b in zip(weights(own), weights(alone), strict=True):
        np.testing.assert_array_equal(a, b)


def check_state_is_averaged_if_wanted() -> None:
    optimizer = hvd.DistributedOptimizer(Adam(0.01), strategy=Averaging(2, state=True))
    trained, _ = fit(optimizer, 4)
    assert equal([array(each) for each in optimizer.variables]) and equal(weights(trained))
    assert len(running(optimizer).names) == 8 and equal([np.array(running(optimizer).names)])
    optimizer = hvd.DistributedOptimizer(Adam(0.01), strategy=Averaging(2))
    fit(optimizer, 4)
    assert not equal([array(each) for each in optimizer.variables]) and not running(optimizer).names


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(SGD(0.01), initial_scale=4.0)


def check_a_rank_that_skips_updates_counts_them() -> None:
    """One rank overflows in steps 2 and 3, and skips them alone. All ranks average after steps 2, 4 and 6."""
    for way in ways():
        optimizer = hvd.DistributedOptimizer(scaled(), strategy=Averaging(2))
        trained, noted = model(), AtBatches()
        trained.compile(optimizer, "mse", **way)
        x, y = data(6)
        if last():
            y[BATCH : 3 * BATCH] = np.inf
        trained.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[noted])
        assert noted.equal == [False, True] * 3, noted.equal
        assert int(optimizer.inner_optimizer.iterations) == (4 if last() else 6)
        assert running(optimizer).count == 6
        assert all(np.isfinite(each).all() for each in weights(trained))


def check_mixed_precision() -> None:
    """compile() makes the LossScaleOptimizer, after the optimizer was attached."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        trained, found = fit(hvd.DistributedOptimizer(SGD(0.01), strategy=Averaging(2)), 4)
    finally:
        keras.config.set_dtype_policy("float32")
    assert isinstance(trained.optimizer, keras.optimizers.LossScaleOptimizer)
    assert running(trained.optimizer).count == 4 and found == [False, True] * 2, found


def check_accumulated_gradients() -> None:
    for way in ways():
        optimizer = hvd.DistributedOptimizer(SGD(0.1, gradient_accumulation_steps=2), strategy=Averaging(2))
        trained, found = fit(optimizer, 9, **way)
        assert running(optimizer).log == ["end", "end", "after"] * 2, running(optimizer).log
        # All ranks are equal at the beginning, and until the pass after an average that moves weights.
        assert found == [True, False, False, True, True, False, False, True, True], found
        optimizer = hvd.DistributedOptimizer(
            SGD(0.1), strategy=Averaging(2), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        same, found = fit(optimizer, 9, **way)
        assert found == [True, False, False, True, True, False, False, True, True], found
        for a, b in zip(weights(trained), weights(same), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def check_before_an_update() -> None:
    for step in steps():
        variables = [keras.Variable(np.zeros(3, "float32")), keras.Variable(np.zeros((2, 2), "float32"))]
        optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=Adding())
        update = step(applying(optimizer, variables))
        ones = [keras.ops.ones((3,)), keras.ops.ones((2, 2))]
        for wanted in (-1.0, 0.0, -1.0, 0.0):
            update(ones)
            assert all((array(each) == 1).all() for each in ones)
            assert all((array(each) == wanted).all() for each in variables), (wanted, variables)


def applying(optimizer: Any, variables: Any) -> Callable[[Any], Any]:
    def apply(grads: Any) -> None:
        optimizer.apply(grads, variables)

    return apply


def steps() -> list[Callable[[Any], Any]]:
    """Ways to call a function with tensors: as it is, and on TensorFlow in a graph."""
    return [lambda function: function, *([tf.function] if on("tensorflow") else [])]


def check_loops_with_a_tape() -> None:
    if not on("tensorflow"):
        return
    for step in steps():
        trained = model()
        optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(3))

        @step
        def train(x: Any, y: Any, trained: Any = trained, optimizer: Any = optimizer) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((trained(x, training=True) - y) ** 2)
            optimizer.apply_gradients(
                zip(tape.gradient(loss, trained.trainable_variables), trained.trainable_variables, strict=True)
            )
            return loss

        x, y = map(tf.constant, data(7))
        found = []
        for number in range(7):
            train(x[number * BATCH :][:BATCH], y[number * BATCH :][:BATCH])
            found.append(equal(weights(trained)))
        assert found == [number % 3 == 0 for number in range(1, 8)], found


def check_several_updates_in_one_graph() -> None:
    if not on("tensorflow"):
        return
    variable = keras.Variable(np.zeros(2, "float32"))
    optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=Averaging(2))

    @tf.function
    def train(rank: Any) -> Any:
        seen = []
        for _ in range(4):
            optimizer.apply([tf.fill([2], -rank)], [variable])
            seen.append(tf.identity(variable.value))
        return seen

    seen = [each.numpy()[0] for each in train(tf.constant(float(hvd.rank())))]
    mean = (hvd.size() - 1) / 2
    assert seen == [hvd.rank(), 2 * mean, 2 * mean + hvd.rank(), 4 * mean], seen
    assert running(optimizer).log == ["end", "end", "after"] * 2


class Stepping(keras.Model):
    """A model with a training step of its own."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(1)
        self.layer = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, *given: Any) -> Any:
        x, y = given[-1]
        if on("tensorflow"):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean((self(x) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        else:
            self.zero_grad()
            loss = keras.ops.mean((self(x) - y) ** 2)
            loss.backward()
            gradients = [each.value.grad for each in self.trainable_variables]
            self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def check_a_training_step_of_the_users() -> None:
    _, found = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(3)), 7, Stepping())
    assert found == [number % 3 == 0 for number in range(1, 8)], found


def check_what_is_refused() -> None:
    any_of: Any = hvd.DistributedOptimizer
    for wrong in (Averaging, 3, "LocalSGD"):
        require_error(TypeError, partial(any_of, SGD(), strategy=wrong), "strategy= takes a strategy")
    choices: list[dict[str, Any]] = [
        {"sharded": True}, {"compression": hvd.Compression.fp16}, {"op": hvd.Sum}, {"gradient_predivide_factor": 2.0},
    ]  # fmt: skip
    for options in choices:
        require_error(NotImplementedError, partial(any_of, SGD(), strategy=Averaging(), **options), "hvd.Averaging")


def check_other_strategies_on_other_ranks() -> None:
    every = 4 if last() else 3
    require_mismatch(
        lambda: hvd.DistributedOptimizer(SGD(), strategy=Averaging(every)), "Averaging(every=3", "Averaging(every=4"
    )
    given = None if last() else Averaging(3)
    require_mismatch(lambda: hvd.DistributedOptimizer(SGD(), strategy=given), "Averaging(every=3", "None")


def check_different_first_weights() -> None:
    """The first average is followed by an error on all ranks."""
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(3))
    trained = model(seed=hvd.rank())
    text = require_error(Exception, lambda: fit(optimizer, 6, trained), "kernel", "(model, root_rank=0)")
    assert "would train different models" in text and "[HVD301]" in text
    assert (np.array(hvdlite.allreduce(np.ones(3), op=hvdlite.Sum)) == hvd.size()).all()


def check_updates_that_average_gradients() -> None:
    """Gradients are averaged in updates 1, 2, 3, 5 and 10; weights in update 6."""
    for way in ways():
        _, found = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=PostLocal(6)), 10, **way)
        assert found == [True, True, True, False, False, True, False, False, False, False], found
        synchronous, _ = fit(hvd.DistributedOptimizer(SGD(0.1)), 3, **way)
        again, _ = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=PostLocal(6)), 3, **way)
        for a, b in zip(weights(again), weights(synchronous), strict=True):
            np.testing.assert_array_equal(a, b)


def check_averages_within_hosts() -> None:
    """On one host: an update that averages gradients keeps the ranks' distance."""
    for step in steps():
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=PostLocal(100, warmup=0))
        update, found = step(applying(optimizer, [variable])), []
        for _ in range(10):
            update([keras.ops.ones((2,)) * float(hvd.rank())])
            found.append(-float(array(variable)[0]))
        mean = (hvd.size() - 1) / 2
        assert np.diff([0.0, *found]).tolist() == [hvd.rank()] * 4 + [mean] + [hvd.rank()] * 4 + [mean], found


def check_averaged_parameters() -> None:
    keras.utils.set_random_seed(hvd.rank())
    layers = [
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(2),
    ]
    trained = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
    trained.count = trained.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False)
    trained.layers[1].moving_mean.assign(np.full(4, hvd.rank(), "float32"))
    trained.count.assign(7 - hvd.rank())
    own = [array(each) for each in trained.weights]
    seeds = [array(each) for each in trained.variables if "seed" in each.path]
    everyones = hvd.allgather_object(own)
    with hvd.average_parameters(trained):
        for each, values in zip(trained.weights, zip(*everyones, strict=True), strict=True):
            wanted = np.max(values) if values[0].dtype.kind == "i" else np.mean(values, axis=0)
            np.testing.assert_allclose(array(each), wanted, rtol=1e-6, atol=1e-7)
        assert equal([array(each) for each in trained.weights])
    assert all(map(np.array_equal, [array(each) for each in trained.weights], own))
    hvd.average_parameters(trained)
    assert equal([array(each) for each in trained.weights]) and int(trained.count) == 7
    assert seeds and all(map(np.array_equal, [array(e) for e in trained.variables if "seed" in e.path], seeds))
    require_error(ValueError, lambda: hvd.average_parameters(keras.Sequential([keras.layers.Dense(2)])), "no weights")


def check_averages_and_a_strategy() -> None:
    """A strategy finishes its work before an average, and is told of values that a broadcast changes."""
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(100))
    trained, _ = fit(optimizer, 2)
    log = running(optimizer).log
    with hvd.average_parameters(trained):
        assert equal(weights(trained))
    fit(optimizer, 1, trained)
    assert log == ["end", "end", "settle", "end"] and not equal(weights(trained)), log
    hvd.average_parameters(trained)
    fit(optimizer, 2, trained)
    assert log[4:] == ["settle", "end", "end"], log
    hvd.broadcast_variables(trained)
    hvd.broadcast_variables(trained)  # changes nothing
    fit(optimizer, 1, trained)
    assert log[7:] == ["moved", "end"], log


def check_evaluation_of_averages() -> None:
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(100))
    trained, _ = fit(optimizer, 3)
    x, y = data(3, rank=7)
    own = weights(trained)
    with hvd.average_parameters(trained):
        wanted = trained.evaluate(x, y, verbose=0)
    found = trained.evaluate(x, y, verbose=0, callbacks=[hvd.callbacks.AverageParametersCallback()])
    assert found == wanted and equal([np.array(found)]) and trained.evaluate(x, y, verbose=0) != wanted
    assert all(map(np.array_equal, weights(trained), own))
    kept = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: losses.append(logs["val_loss"]))
    losses: list[float] = []
    callbacks = [hvd.callbacks.AverageParametersCallback(), kept]
    trained.fit(*data(2), batch_size=BATCH, verbose=0, validation_data=(x, y), callbacks=callbacks)
    assert equal([np.array(losses)]) and not equal(weights(trained))


def check_the_usual_callbacks() -> None:
    """Weights that differ at the end of an epoch are no error, and steps that reduce no gradients neither."""
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(2))
    trained = model(seed=hvd.rank())
    trained.compile(optimizer, "mse")
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
    trained.fit(*data(3), batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    assert running(optimizer).count == 6 and equal(weights(trained))
    trained.fit(*data(1), batch_size=BATCH, verbose=0)
    assert not equal(weights(trained))


def check_checkpoints() -> None:
    """Training continues at the count in the file, from rank 0's weights."""
    path = folder() / "run.npz"
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(3))
    trained, _ = fit(optimizer, 4)
    hvd.save(path, model=trained, epoch=1)
    assert running(optimizer).log[-1] == "settle"
    if hvd.rank() == 0:
        with np.load(path) as entries:
            assert "strategy/model.optimizer/count" in entries, list(entries)
            assert int(entries["strategy/model.optimizer/count"]) == 4
    other = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(3))
    again = model(seed=5)
    again.compile(other, "mse")
    assert hvd.load(path, model=again) == {"epoch": 1}
    _, found = fit(other, 3, again)
    assert found == [False, True, False] and running(other).count == 7 and "moved" not in running(other).log
    assert hvd.load(path, model=again) == {"epoch": 1}
    _, found = fit(other, 2, again)
    assert found == [False, True] and running(other).count == 6
    plain = model()
    plain.compile(hvd.DistributedOptimizer(SGD(0.1)), "mse")
    assert hvd.load(path, model=plain) == {"epoch": 1}
    hvd.save(path, model=plain)
    assert hvd.load(path, model=again) == {} and fit(other, 1, again)
    assert "moved" in running(other).log and running(other).count == 7


def folder() -> Path:
    """A new folder, the same on all ranks."""
    return Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None, 0))


def check_local_variables() -> None:
    trained = model()
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(1))
    optimizer.register_local_var(trained.layers[0])
    fit(optimizer, 2, trained)
    assert [equal([each]) for each in weights(trained)] == [False, False, True, True]
    optimizer.register_local_var(trained.layers[1])
    require_error(RuntimeError, lambda: fit(optimizer, 1, recompiled(trained)), "register_local_var")


def recompiled(trained: Any) -> Any:
    trained.make_train_function(force=True)
    return trained


def check_a_restart() -> None:
    """After an error all ranks go on from the last commit and rank 0's count, with compiled steps."""
    optimizer, trained = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(3)), model()
    trained.compile(optimizer, "mse")
    state, failed, equals = hvd.elastic.KerasState(trained, epoch=0), [], []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 4:
            equals.append(fit(optimizer, 2, trained)[1])
            if state.epoch == 1 and not failed:
                failed.append(True)
                raise hvdlite.errors.HvdliteError("a failure")
            state.epoch += 1
            state.commit()

    train(state)
    assert running(optimizer).count == 10 and len(equals) == 5  # 4 updates, a failure, and 6 more
    assert running(optimizer).log[0] == "moved", running(optimizer).log
    assert equals[:2] == [[False, False], [True, False]] and equals[2:] == [
        [False, True],
        [False, False],
        [True, False],
    ], equals


def check_graphs_keep_nothing_alive() -> None:
    optimizer, trained = hvd.DistributedOptimizer(SGD(0.1), strategy=Averaging(2)), model()
    fit(optimizer, 2, trained)
    steps = ref(attachment_of(optimizer).strategy)
    del optimizer, trained
    keras.backend.clear_session()
    gc.collect()
    assert steps() is None


def check_local_sgd() -> None:
    for way in ways():
        strategy = hvd.LocalSGD(sync_every=3, warmup_steps=2, state="average")
        optimizer = hvd.DistributedOptimizer(Adam(0.01), strategy=strategy)
        _, found = fit(optimizer, 9, **way)
        assert found == [True, True, False, False, True, False, False, True, False], found
        once = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.LocalSGD(sync_every=1)), 4, **way)[0]
        synchronous = fit(hvd.DistributedOptimizer(SGD(0.1)), 4, **way)[0]
        for a, b in zip(weights(once), weights(synchronous), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        _, found = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.LocalSGD(4, hierarchical=True)), 5, **way)
        assert found == [True] * 5, found


def check_diloco() -> None:
    """Outer SGD with the rate 1 is an average; fragments that travel arrive; training resumes in fit()."""
    outer = hvd.OuterSGD(lr=1.0, momentum=0.0, nesterov=False)
    for way in ways():
        one = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.DiLoCo(2, outer)), 6, **way)[0]
        other = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.LocalSGD(2)), 6, **way)[0]
        for a, b in zip(weights(one), weights(other), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        strategy = hvd.DiLoCo(4, fragments=2, overlap=1)
        trained, found = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=strategy), 9, **way)
        assert not any(found)
        hvd.average_parameters(trained)
        assert equal(weights(trained))


def check_diloco_resumes() -> None:
    """Common weights and outer state come from the file, also if the usual callback broadcasts."""
    path = folder() / "run.npz"

    def build(seed: int) -> Any:
        trained = model(seed)
        trained.compile(hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.DiLoCo(3)), "mse")
        return trained

    def train(trained: Any, callbacks: Any = ()) -> list[np.ndarray]:
        trained.fit(*data(6), batch_size=BATCH, shuffle=False, verbose=0, callbacks=list(callbacks))
        return weights(trained)

    run, again = build(1), build(2)
    train(run)
    hvd.save(path, model=run)
    wanted = train(run)
    hvd.load(path, model=again)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    for a, b in zip(train(again, callbacks), wanted, strict=True):
        np.testing.assert_array_equal(a, b)


def check_neighbors() -> None:
    """Both modes on one weight, against a simulation of all ranks with NumPy."""
    p, rate = hvd.size(), 0.1
    targets = np.random.default_rng(0).standard_normal((p, 6))
    lopsided = 0.75 * np.eye(p) + 0.25 * np.roll(np.eye(p), 1, axis=1)
    for topology, matrix in ((hvd.RingGraph, hvd.RingGraph(p).matrix), (lopsided, lopsided)):
        for mode in ("combine-then-adapt", "adapt-then-combine"):
            wanted = np.ones(p)
            for target in targets.T:
                change = -rate * 2 * (wanted - target)
                combines_first = mode == "combine-then-adapt"
                wanted = matrix @ wanted + change if combines_first else matrix @ (wanted + change)
            for way in ways():
                trained = one_weight()
                strategy = hvd.Neighbors(topology, mode=mode)
                trained.compile(hvd.DistributedOptimizer(SGD(rate), strategy=strategy), "mse", **way)
                trained.fit(np.ones((6, 1)), targets[hvd.rank()], batch_size=1, shuffle=False, verbose=0)
                np.testing.assert_allclose(weights(trained)[0], wanted[hvd.rank()], rtol=1e-6)
                with hvd.average_parameters(trained):
                    np.testing.assert_allclose(weights(trained)[0], wanted.mean(), rtol=1e-6)


def one_weight() -> Any:
    """A model with one weight, which is 1."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    return keras.Sequential([keras.layers.Input((1,)), layer])


def check_no_staleness_is_synchronous_training() -> None:
    for way in ways():
        bounded, found = fit(hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.BoundedStaleness(0)), 6, **way)
        synchronous, _ = fit(hvd.DistributedOptimizer(SGD(0.1)), 6, **way)
        assert all(found), found
        for a, b in zip(weights(bounded), weights(synchronous), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)


def check_staleness() -> None:
    """All updates are in the average, whatever their order: each rank's gradients are constant."""
    for way in ways():
        trained, before = one_weight(), sum(hvd.staleness().values())
        optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.BoundedStaleness(clock=2))
        trained.compile(optimizer, lambda y, found: (1.0 + hvd.rank()) * keras.ops.mean(found), **way)
        for steps in (9, 18):
            trained.fit(np.ones((9, 1)), np.ones((9, 1)), batch_size=1, verbose=0)
            with hvd.average_parameters(trained):
                assert equal(weights(trained))
                np.testing.assert_allclose(weights(trained)[0], 1 - 0.1 * steps * (hvd.size() + 1) / 2, rtol=1e-5)
        assert sum(hvd.staleness().values()) - before == 18


def descending(optimizer: Any, variable: Any, slope: float) -> Callable[[], None]:
    """A step of the user's own loop, for the loss `slope * sum(variable)`."""

    def train() -> None:
        if on("tensorflow"):
            with tf.GradientTape() as tape:
                loss = slope * tf.reduce_sum(variable.value)
            gradient = tape.gradient(loss, variable.value)
        else:
            gradient = slope * keras.ops.ones_like(variable)
        optimizer.apply([gradient], [variable])

    return train


def check_join() -> None:
    """Rank 0 joins after 3 updates, the others after 6; all average in update 8, and not one by one before."""
    for step in steps():
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=hvd.LocalSGD(2))
        train: Any = step(descending(optimizer, variable, 1.0 + hvd.rank()))
        for _ in range(6 if hvd.rank() else 3):
            train()
        hvdlite.join()
        before = hvd.allgather_object(array(variable)[0])
        assert before[0] == -(hvd.size() + 1) - 1 and before[1] < before[0], before
        train()
        assert array(variable)[0] == before[hvd.rank()] - 1 - hvd.rank()
        train()
        np.testing.assert_allclose(array(variable), np.mean(before) - hvd.size() - 1, rtol=1e-6)
        assert equal([array(variable)])


def check_join_is_refused() -> None:
    """With strategies whose ranks would wait for one that has joined, while the optimizer lives."""
    for strategy, words in ((hvd.Neighbors(hvd.RingGraph), "RingGraph"),
                            (hvd.LocalSGD(2, hierarchical=True), "hierarchical=True")):  # fmt: skip
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=strategy)
        for _ in range(2):
            optimizer.apply([keras.ops.ones((2,))], [variable])
            require_error(RuntimeError, hvdlite.join, "hvd.join() is not possible", words)
        del optimizer
        gc.collect()
        hvdlite.join()


def check_mailboxes_end_with_their_optimizers() -> None:
    """Also if they go at different times."""
    for _ in range(3):
        variable = keras.Variable(np.zeros(2, "float32"))
        optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=hvd.BoundedStaleness(clock=1))
        for _ in range(2):
            optimizer.apply([keras.ops.ones((2,))], [variable])
        del optimizer
        if hvd.rank():
            gc.collect()
    gc.collect()
    require_threads_end("hvdlite-mailbox")


def check_a_parameter_server() -> None:
    """The last rank serves. The average leaves out its statistics, and gives it the workers'."""
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(2), keras.layers.BatchNormalization()]
    trained = keras.Sequential([keras.layers.Input((WIDTH,)), *layers])
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.BoundedStaleness(clock=1, servers=1))
    trained.compile(optimizer, "mse")
    x, y = data(5)
    train = partial(trained.fit, x, y, batch_size=BATCH, verbose=0)
    if last():
        require_error(ValueError, lambda: hvd.serve_parameters(optimizer, trained), "optimizer.build")
        optimizer.build(trained.trainable_variables)
        layers[1].moving_mean.assign(np.full(2, 100, "float32"))
        hvd.serve_parameters(optimizer, trained)
    else:
        train()
        require_error(ValueError, lambda: hvd.serve_parameters(optimizer, trained), "servers")
        hvd.average_parameters(trained)
        assert abs(array(layers[1].moving_mean)).max() > 0
    mine = [array(each) for each in trained.weights]
    assert all(abs(each).max() < 10 for each in mine), mine
    restart(COMPRESS_WITHIN_HOST="1")
    assert equal(mine)


def check_a_restart_with_bounded_staleness() -> None:
    """After an error all ranks go on from the last commit: that of rank 0, to which an average adds all updates."""
    trained = one_weight()
    optimizer = hvd.DistributedOptimizer(SGD(0.1), strategy=hvd.BoundedStaleness(clock=1))
    trained.compile(optimizer, lambda y, found: (1.0 + hvd.rank()) * keras.ops.mean(found))
    state, failed = hvd.elastic.KerasState(trained, epoch=0), []

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.epoch < 3:
            trained.fit(np.ones((4, 1)), np.ones((4, 1)), batch_size=1, verbose=0)
            if state.epoch == 1 and not failed:
                failed.append(True)
                raise hvdlite.errors.HvdliteError("a failure")
            state.epoch += 1
            hvd.average_parameters(trained)
            state.commit()

    train(state)
    with hvd.average_parameters(trained):
        assert equal(weights(trained))
        np.testing.assert_allclose(weights(trained)[0], 1 - 0.1 * 12 * (hvd.size() + 1) / 2, rtol=1e-5)
