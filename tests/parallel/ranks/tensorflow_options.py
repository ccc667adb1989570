"""Options of Keras optimizers and arguments of DistributedOptimizer: each trains like one process."""

from __future__ import annotations

import tempfile
import unittest.mock
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdlite
import hvdlite.tensorflow as hvd
import hvdlite.tensorflow.keras as hvd_keras
from hvdlite.gradients.variables import name_of
from hvdlite.keras import private_api
from hvdlite.keras.attachment import innermost
from tests.parallel.common import last, require_error, require_same_bits
from tests.parallel.keras_common import (
    BATCH,
    OPTIMIZERS,
    STEPS,
    WIDTH,
    alone,
    both,
    data,
    fit,
    model,
    require_close,
    require_one_big_batch_norm,
    share,
    weights,
)

SIZES = (2,)


def check_fit_eagerly_and_many_steps_at_once() -> None:
    both(OPTIMIZERS["Adam"], compiled={"run_eagerly": True})
    both(OPTIMIZERS["Adam"], compiled={"steps_per_execution": 3})


def check_options_see_averaged_gradients() -> None:
    """Clipping, EMA, weight decay, and Keras' own accumulation."""
    for options in (
        {"global_clipnorm": 0.1, "use_ema": True, "ema_overwrite_frequency": 4, "weight_decay": 0.1},
        {"clipnorm": 0.05, "gradient_accumulation_steps": 2},
    ):
        both(lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options))


class Optimistic(keras.optimizers.Optimizer):
    """An optimizer that keeps the last step's gradient."""

    def build(self, variables: list[Any]) -> None:
        if not self.built:
            super().build(variables)
            self.last = self.add_optimizer_variables(variables, "last")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        last = self.last[self._get_variable_index(variable)]
        self.assign_sub(variable, tf.cast(learning_rate, variable.dtype) * (2 * gradient - last))
        self.assign(last, gradient)


def check_an_optimizer_that_keeps_gradients() -> None:
    both(lambda: Optimistic(0.05))
    both(lambda: keras.optimizers.MultiOptimizer(partial(lambda own, variable: own, Optimistic(0.05))))


def check_a_sparse_gradient_that_no_rank_has() -> None:
    def train(optimizer: Any) -> Any:
        table, w = tf.Variable(tf.ones([4, 2])), tf.Variable(tf.ones([2]))
        for step in range(4):
            with tf.GradientTape() as tape:
                rows = tf.reduce_sum(tf.gather(table, [0, 1]) * w) if step % 2 == 0 else 0.0
                loss = tf.reduce_sum(w**2) + rows
            optimizer.apply(tape.gradient(loss, [table, w]), [table, w])
        return [table.numpy()]

    expected = train(keras.optimizers.SGD(0.1, momentum=0.9))
    require_close(
        train(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))), expected, "None in two steps"
    )


def check_arguments() -> None:
    for module in (hvd, hvd_keras):
        module.barrier()
    both(OPTIMIZERS["momentum"], groups=2)
    both(OPTIMIZERS["momentum"], gradient_predivide_factor=2.0)
    both(OPTIMIZERS["momentum"], compression=hvd.Compression.fp16, tolerance=0.02)
    expected = alone(lambda: weights(fit(keras.optimizers.SGD(0.01))))
    summed = keras.optimizers.SGD(0.01 / hvd.size())
    together = fit(hvd.DistributedOptimizer(summed, op=hvd.Sum), share(), BATCH // hvd.size())
    require_close(weights(together), expected, "Sum")
    for given in (None, keras.optimizers.SGD(0.01)):
        require_error(
            TypeError, lambda: hvd.DistributedGradientTape(given), "takes a tf.GradientTape", type(given).__name__
        )


class Scaled:
    """A user's compressor: integers that count units of 1/1024."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, None]:
        return keras.ops.cast(tensor * 1024, "int64"), None

    @staticmethod
    def decompress(tensor: Any, ctx: None) -> Any:
        return keras.ops.cast(tensor, "float32") / 1024


def check_compressors() -> None:
    """A gradient of one rank reaches the others in the variable's dtype; a gradient that no rank has is None."""
    rank, p = hvd.rank(), hvd.size()

    def step(compression: Any, variables: list[tf.Variable]) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variables[0]) * (rank + 1)
            loss += 3 * tf.reduce_sum(variables[1]) if rank == 0 else 0
        return hvd.DistributedGradientTape(tape, op=hvd.Sum, compression=compression).gradient(loss, variables)

    for compression in (hvd.Compression.none, hvd.Compression.fp16, hvd.Compression.bf16, Scaled):
        eagerly = partial(step, compression, [tf.Variable(tf.ones(shape)) for shape in ((3, 2), (4,), (2,))])
        for run in (eagerly, tf.function(eagerly), eagerly):
            both_have, one_has, none_has = run()
            assert both_have.dtype == one_has.dtype == tf.float32 and none_has is None
            np.testing.assert_array_equal(both_have, np.full((3, 2), p * (p + 1) / 2))
            np.testing.assert_array_equal(one_has, np.full(4, 3.0))
    both(OPTIMIZERS["momentum"], compression=Scaled, tolerance=0.1)


def check_several_passes_per_step() -> None:
    """Two passes with half a batch each equal one pass with the whole batch; each pass is one iteration."""
    if BATCH // hvd.size() % 2:
        return
    for eagerly in (False, True):
        together = both(
            OPTIMIZERS["momentum"],
            batch=BATCH // hvd.size() // 2,
            compiled={"run_eagerly": eagerly},
            backward_passes_per_step=2,
            average_aggregated_gradients=True,
        )
        assert int(together.optimizer.iterations) == 4 * STEPS


def check_passes_and_what_else_counts_iterations() -> None:
    """Keras' own accumulation, and its averages of weights, count iterations."""
    for options in ({"use_ema": True}, {"gradient_accumulation_steps": 2}):
        for optimizer in (keras.optimizers.SGD(0.1, **options),
                          keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1, **options))):  # fmt: skip
            attach = partial(hvd.DistributedOptimizer, optimizer, backward_passes_per_step=2)
            require_error(ValueError, attach, "use gradient_accumulation_steps alone")


def check_passes_in_which_some_have_no_gradient() -> None:
    """Sums of all passes count, whichever variables have a gradient in the last pass. A graph cannot follow, and raises an
    error."""
    a, b, one = keras.Variable([0.0]), keras.Variable([0.0]), tf.ones(1)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for second, expected in ((None, (-2, -1)), (one, (-4, -3)), (None, (-6, -4))):
        optimizer.apply([one, one], [a, b])
        optimizer.apply([one, second], [a, b])
        assert (float(a.numpy()[0]), float(b.numpy()[0])) == expected, (a, b, expected)

    helper: Any = hvd.LocalGradientAggregationHelper(2, lambda grads, variables: grads, False, False)
    helper.compute_gradients([one, one], [a, b])
    assert [grad.numpy().item() for grad in helper.compute_gradients([one, None], [a, b])] == [2, 1]

    @tf.function
    def passes(both: bool) -> Any:
        return helper.compute_gradients([one, one if both else None], [a, b])

    passes(True)
    require_error(tf.errors.InvalidArgumentError, lambda: passes(False), "variables [1]", "tf.zeros_like")


def check_numbers_of_bfloat16() -> None:
    """A scalar weight, which NumPy cannot read from a TensorFlow tensor: in one pass, in two, and with a tape."""
    mean = (hvd.size() - 1) / 2
    gradient = tf.constant(float(hvd.rank()), tf.bfloat16)
    for passes in (1, 2):
        weight = keras.Variable(4.0, dtype="bfloat16")
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=passes)
        for _ in range(passes):
            optimizer.apply([gradient], [weight])
        assert float(weight.numpy()) == 4.0 - passes * mean, (passes, weight)
    variable = tf.Variable(2.0, dtype=tf.bfloat16)
    with tf.GradientTape() as tape:
        loss = variable * gradient
    assert float(hvd.DistributedGradientTape(tape).gradient(loss, variable).numpy()) == mean


def embedding() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Lambda(lambda x: tf.cast(x + 2, tf.int32)), keras.layers.Embedding(5, 3)]
    return keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Flatten(), keras.layers.Dense(2)])


def check_replicas_are_refused() -> None:
    """Replicas of a TensorFlow strategy would mix up their rounds."""
    optimizer, weight = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), keras.Variable([1.0])
    strategy = unittest.mock.Mock(num_replicas_in_sync=2)
    with unittest.mock.patch.object(tf.distribute, "get_strategy", lambda: strategy):
        require_error(
            NotImplementedError,
            lambda: optimizer.apply([tf.constant([1.0])], [weight]),
            "2 replicas",
            "one process per",
        )
        attach = partial(hvd.DistributedOptimizer, keras.optimizers.SGD(1.0))
        require_error(NotImplementedError, attach, "2 replicas", "one process per")
    np.testing.assert_array_equal(weight, [1.0])
    private_api.require_guarded_step.cache_clear()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():  # one replica
        attach()


def check_keras_2_is_told() -> None:
    kind = type("Adam", (), {"__module__": "tf_keras.src.optimizers.adam"})
    for module in (hvd, hvd_keras):
        require_error(
            TypeError,
            lambda: module.DistributedOptimizer(kind()),
            "Adam is of Keras 2",
            "DistributedGradientTape",
        )


def check_one_mistake_is_one_kind_of_error() -> None:
    """The error is the same from TensorFlow's optimizers, Keras' optimizers and the tape."""
    ways = {
        "TF1": lambda **given: hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1), **given),
        "Keras": lambda **given: hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1), **given),
        "tape": lambda **given: hvd.DistributedGradientTape(tf.GradientTape(), **given),
    }
    refused: list[tuple[type[Exception], dict[str, Any]]] = [
        (NotImplementedError, {"op": hvd.Adasum}), (ValueError, {"op": 17}), (ValueError, {"groups": "all"}),
        (ValueError, {"compression": 3}), (ValueError, {"gradient_predivide_factor": 0}), (TypeError, {"process_set": 3}),
    ]  # fmt: skip
    for kind, given in refused:
        for way in ways.values():
            require_error(kind, lambda: way(**given))
    for nothing in (5, keras.layers.Dense(1)):
        for module in (hvd, hvd_keras):
            require_error(TypeError, lambda: module.DistributedOptimizer(nothing),
                          "takes a", "first, not a", type(nothing).__name__)  # fmt: skip


def check_float8_is_refused() -> None:
    small = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4)])
    small.quantize("float8")
    small.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=False)
    if hvd.size() > 1:
        x = np.ones((2, 4), np.float32)
        require_error(NotImplementedError, lambda: small.train_on_batch(x, x), "float8")


def check_a_module_with_a_collective_can_be_saved() -> None:
    class Module(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([2])])
        def mean(self, x: Any) -> Any:
            return hvd.allreduce(x, name="mean")

    module = Module()
    assert module.mean(tf.fill([2], float(hvd.rank()))).numpy().tolist() == [(hvd.size() - 1) / 2] * 2
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)


def check_sparse_gradients() -> None:
    for options in list[dict[str, Any]](({}, {"sparse_as_dense": True})):
        both(OPTIMIZERS["SGD"], embedding, **options)
        both(OPTIMIZERS["SGD"], embedding, compiled={"run_eagerly": True}, **options)


def check_mixed_precision() -> None:
    """With a LossScaleOptimizer, the user's or one that compile() adds, all ranks skip a step together."""

    def build() -> Any:
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return model()
        finally:
            keras.config.set_dtype_policy("float32")

    def scaled() -> Any:
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=16.0)

    both(scaled, build, tolerance=0.02)  # a few dozen float16 products with errors of 5e-4
    x, y = data()
    x, y = x[share()].copy(), y[share()]
    if last():
        x[0] = np.inf  # only one rank, in the first step
    for optimizer in (scaled(), keras.optimizers.SGD(0.05)):
        trained = build()
        trained.compile(hvd.DistributedOptimizer(optimizer), "mse")
        trained.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
        assert all(np.isfinite(w).all() for w in weights(trained))
        require_same_bits([np.asarray(v) for v in trained.optimizer.variables])
        steps, skipped = int(innermost(trained.optimizer).iterations), hvd.size() > 1
        assert steps <= STEPS - skipped, steps
        if optimizer.name.startswith("loss_scale"):
            assert steps == STEPS - skipped, steps


def check_the_optimizer_remains_itself() -> None:
    optimizer = keras.optimizers.Adam(0.01)
    config = optimizer.get_config()
    hvd.DistributedOptimizer(optimizer)
    assert type(optimizer) is keras.optimizers.Adam and optimizer.get_config() == config
    require_error(RuntimeError, lambda: hvd.DistributedOptimizer(optimizer), "attached already")


def check_an_optimizers_state_is_broadcast() -> None:
    """The argument is the optimizer, or the optimizer and its model, in every front."""
    for broadcast in (hvd.broadcast_variables, hvd_keras.broadcast_variables, hvdlite.broadcast_variables):
        for wrapped in (lambda optimizer: optimizer, keras.optimizers.LossScaleOptimizer):
            for given in (lambda trained, optimizer: optimizer, lambda trained, optimizer: [trained, optimizer]):
                trained, optimizer = model(), wrapped(keras.optimizers.Adam(0.01 * (hvd.rank() + 1)))
                optimizer.build(trained.trainable_variables)
                broadcast(given(trained, optimizer), 1)
                np.testing.assert_allclose(np.array(optimizer.learning_rate), 0.02, rtol=1e-6)


def check_names_that_keras_invents_do_not_matter() -> None:
    """Rank 0 has built another model before."""
    if hvd.rank() == 0:
        model()
    hvd.broadcast_variables(model(), 0)
    both(OPTIMIZERS["SGD"])


def check_a_model_that_one_rank_loaded() -> None:
    """A loaded model has other names than a built one. Weights and the optimizer's state come from rank 0. A batch norm over
    all ranks counts as the same layer."""

    def build() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4), hvd.SyncBatchNormalization(), keras.layers.Dense(2)]
        return keras.Sequential([keras.layers.Input((WIDTH,)), *layers])

    x, y = data()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.keras"
        saved = build()
        saved.compile(keras.optimizers.Adam(0.01), "mse")
        saved.optimizer.build(saved.trainable_variables)
        saved.optimizer.iterations.assign(7)
        saved.save(path)
        trained = keras.models.load_model(path) if hvd.rank() == 0 else build()
    optimizer = trained.optimizer if hvd.rank() == 0 else keras.optimizers.Adam(0.01)
    trained.compile(hvd.DistributedOptimizer(optimizer), "mse")
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    trained.fit(x[share()], y[share()], batch_size=BATCH // hvd.size(), callbacks=[callback], verbose=0)
    assert int(trained.optimizer.iterations) == 7 + STEPS, trained.optimizer.iterations
    require_same_bits([np.array(v) for v in (*trained.weights, *trained.optimizer.variables)])


def check_layers_of_layers_that_one_rank_loaded() -> None:
    """Without a callback. The file's names lack the enclosing layers; one layer has sparse gradients."""

    def build() -> Any:
        keras.utils.set_random_seed(hvd.rank())
        layers = keras.layers
        inner = [layers.Embedding(10, 3), layers.TimeDistributed(layers.Dense(2)), hvd.SyncBatchNormalization()]
        outer = keras.Sequential([keras.Sequential(inner, name="words"), layers.Flatten(), layers.Dense(2)], name="net")
        outer.build((None, 4))
        return outer

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.keras"
        build().save(path)
        trained = keras.models.load_model(path) if hvd.rank() == 0 else build()
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    trained.compile(hvd.DistributedOptimizer(optimizer), "mse")
    optimizer.build(trained.trainable_variables)
    names = hvd.allgather_object([name_of(each) for each in (*trained.weights, *optimizer.variables)])
    assert all(mine != theirs for mine, theirs in zip(names[0], names[1], strict=True) if "dense/kernel" in mine)
    hvd.broadcast_variables([*trained.weights, *optimizer.variables], 0)
    require_same_bits([np.array(v) for v in trained.weights])
    x = np.random.default_rng(hvd.rank()).integers(0, 10, (8, 4))
    trained.fit(x, np.ones((8, 2)), batch_size=4, epochs=2, verbose=0)
    require_same_bits([np.array(v) for v in (*trained.trainable_variables, *optimizer.variables)])


def check_a_model_that_one_rank_alone_has_built() -> None:
    """Keras reports a user's model as built, though build() could not create the weights of its layers."""

    class Mine(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, inputs: Any) -> Any:
            return self.layer(inputs)

    x, y = data()
    trained = Mine()
    trained.built = True
    if hvd.rank() == 0:
        trained(x[:1])
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    trained.fit(x[share()], y[share()], batch_size=BATCH // hvd.size(), callbacks=[callback], verbose=0)
    require_same_bits(weights(trained))


def check_xla_is_refused() -> None:
    """Without the callback that turns XLA off, the first step raises an error."""
    if hvd.size() > 1:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05))
        require_error(
            RuntimeError, lambda: fit(optimizer, share(), BATCH // hvd.size(), jit_compile=True), "jit_compile=False"
        )


def check_batch_norm_over_all_ranks() -> None:
    """The layer trains like one process with the whole batch; ranks agree, also with batches of different sizes."""
    require_one_big_batch_norm(hvd)
