"""`DistributedOptimizer(strategy=...)` for Keras: what an optimizer does around its updates.

`test_keras_backends` runs these checks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from hvdlite.keras.attachment import attachment_of
from hvdlite.ops import Average, grouped_allreduce_
from hvdlite.strategies import Running, Site, Strategy
from tests.parallel.common import last, require_error, require_mismatch

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
class Halving(Strategy):
    """Halves the gradients of every second update, before which it adds 1 to all weights."""

    def start(self, site: Site) -> Running:
        return Halver()


class Halver(Running):
    def __init__(self) -> None:
        self.count = 0

    def update_begins(self) -> bool:
        self.count += 1
        return self.count % 2 == 0

    def before_update(self, weights: Sequence[Any], gradients: Sequence[Any]) -> None:
        for weight, gradient in zip(weights, gradients, strict=True):
            weight += 1
            if gradient is not None:
                gradient /= 2


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
        optimizer = hvd.DistributedOptimizer(SGD(1.0), strategy=Halving())
        update = step(applying(optimizer, variables))
        ones = [keras.ops.ones((3,)), keras.ops.ones((2, 2))]
        for wanted in (-1.0, -0.5, -1.5, -1.0):
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
    assert "would train different models" in text
    assert (np.array(hvdlite.allreduce(np.ones(3), op=hvdlite.Sum)) == hvd.size()).all()
