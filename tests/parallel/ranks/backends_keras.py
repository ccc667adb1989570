"""Checks that Keras on PyTorch and on JAX trains as one process does. `test_keras_backends` runs them on both."""

from __future__ import annotations

import contextlib
import functools
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from hvdlite.gradients import watched
from tests.parallel.common import digest, last, require_error, require_same_bits
from tests.parallel.keras_common import (
    BATCH,
    OPTIMIZERS,
    WIDTH,
    alone,
    both,
    data,
    fit,
    model,
    require_close,
    require_job_metrics,
    require_layers_that_follow,
    require_one_big_batch_norm,
    require_resuming,
    share,
    weights,
)

with contextlib.suppress(ImportError):
    import tensorflow as tf  # noqa: F401  (Keras imports it in its first fit(), which takes a minute from a cold disk)

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported


def on(backend: str) -> bool:
    return bool(keras.backend.backend() == backend)


def spoil_tokens() -> None:
    """Make JAX's tokens fail, as on a GPU: there, a failed callback fails every later callback."""
    from jax._src.dispatch import runtime_tokens

    token = unittest.mock.Mock()
    token.block_until_ready.side_effect = RuntimeError("what has failed before")
    runtime_tokens.current_tokens = dict.fromkeys(runtime_tokens.current_tokens, token)


def check_fit() -> None:
    for make in OPTIMIZERS.values():
        both(make)


def check_resuming() -> None:
    require_resuming(hvd)


def check_options_see_averaged_gradients() -> None:
    for options in ({"global_clipnorm": 0.1, "use_ema": True}, {"clipnorm": 0.05, "gradient_accumulation_steps": 2}):
        both(lambda: keras.optimizers.SGD(0.05, momentum=0.9, **options))
    both(OPTIMIZERS["SGD"], compression=hvd.Compression.bf16, tolerance=0.1)
    both(OPTIMIZERS["momentum"], compiled={"run_eagerly": True})


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(OPTIMIZERS["momentum"](), initial_scale=4.0)


def check_compiled_by_torch() -> None:
    """hvdlite reduces gradients outside of the compiled code. (Dynamo only: inductor would compile C++ for 30 s.)"""
    if not on("torch"):
        return
    import torch

    expected = alone(lambda: weights(fit(OPTIMIZERS["SGD"]())))
    with unittest.mock.patch.object(torch, "compile", functools.partial(torch.compile, backend="eager")):
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"]())
        together = fit(optimizer, share(), BATCH // hvd.size(), jit_compile=True)
    require_close(weights(together), expected, "jit_compile")


def check_several_passes_per_step() -> None:
    arguments: dict[str, Any] = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    if on("torch"):
        both(OPTIMIZERS["momentum"], batch=BATCH // hvd.size() // 2, **arguments)
    else:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), **arguments)
        require_error(NotImplementedError, lambda: fit(optimizer, share(), 3), "gradient_accumulation_steps")
        for make in (OPTIMIZERS["momentum"], scaled):
            both(make, batch=BATCH // hvd.size() // 2, compiled={"run_eagerly": True}, **arguments)


def check_passes_of_a_number() -> None:
    """Several passes work for a weight without dimensions."""
    mean, gradient = (hvd.size() - 1) / 2, keras.ops.convert_to_tensor(float(hvd.rank()))
    for average, applied in ((False, 2 * mean), (True, mean)):
        options: dict[str, Any] = {"backward_passes_per_step": 2, "average_aggregated_gradients": average}
        optimizer, weight = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options), keras.Variable(4.0)
        for _ in range(2):
            optimizer.apply([gradient], [weight])
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(weight), 4.0 - applied)


def check_embedding() -> None:
    def build() -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Lambda(lambda x: keras.ops.cast(x + 2, "int32")), keras.layers.Embedding(5, 3)]
        return keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Flatten(), keras.layers.Dense(2)])

    both(OPTIMIZERS["SGD"], build)


def check_mixed_precision_skips_together() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    trained = model()
    keras.config.set_dtype_policy("float32")
    x, y = data()
    x, y = x[share()].copy(), y[share()]
    if last():
        x[0] = np.inf  # on one rank, in the first step
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=16.0)
    trained.compile(hvd.DistributedOptimizer(optimizer), "mse")
    trained.fit(x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    steps = len(x) // (BATCH // hvd.size())
    assert int(trained.optimizer.inner_optimizer.iterations) == steps - 1
    assert all(np.isfinite(w).all() for w in weights(trained))
    require_same_bits([np.array(keras.ops.convert_to_numpy(v)) for v in trained.optimizer.variables])


def check_callbacks() -> None:
    """Ranks with different first weights train as rank 0 does alone; an optimizer that is not distributed is an error."""
    expected = alone(lambda: weights(fit(keras.optimizers.SGD(0.05, momentum=0.9))))
    trained = model()
    for variable in trained.trainable_variables:
        variable.assign(variable + float(hvd.rank()))
    x, y = data()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(weighted=True),
        hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
        hvd.callbacks.LearningRateScheduleCallback(0.05, 1.0, start_epoch=1),
    ]  # fmt: skip

    def train(optimizer: Any, callbacks: Any) -> Any:
        trained.compile(optimizer, "mse")
        arguments = {"batch_size": BATCH // hvd.size(), "epochs": 2, "shuffle": False, "verbose": 0}
        return trained.fit(x[share()], y[share()], callbacks=callbacks, **arguments)

    train(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), callbacks[:2])
    require_close(weights(trained), expected, "broadcast")
    history = train(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), callbacks[1:]).history
    np.testing.assert_allclose(history["lr"], [0.05, 0.05], rtol=1e-6)
    require_same_bits(weights(trained))
    plain = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    require_error(RuntimeError, lambda: train(keras.optimizers.SGD(0.05), plain), "trains alone")


def check_a_rank_that_ends_an_epoch_early() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 2 and last()

    trained, callbacks = model(), [hvd.callbacks.BroadcastGlobalVariablesCallback(0), Stop()]
    trained.compile(hvd.DistributedOptimizer(OPTIMIZERS["SGD"]()), "mse")
    kind = Exception if on("jax") else hvdlite.MismatchError  # an error of XLA, if a compiled step runs
    require_error(kind, lambda: trained.fit(*data(), batch_size=BATCH, epochs=2, verbose=0, callbacks=callbacks),
                  f"rank {hvd.size() - 1} came to the end of epoch 1", "stop_training")  # fmt: skip
    if on("jax"):
        spoil_tokens()
    another = model()  # on JAX, the failed step has deleted the first model's weights
    another.compile(hvd.DistributedOptimizer(OPTIMIZERS["SGD"]()), "mse")
    another.fit(*data(), batch_size=BATCH, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    require_same_bits(weights(another))


def check_stateless_apply() -> None:
    """A user's own loop on JAX passes the state to each step and gets it back."""
    if on("torch"):
        return
    import jax

    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([variable])
    hvd.DistributedOptimizer(optimizer)
    gradient = np.full(3, hvd.rank() + 1, "float32")
    state = [v.value for v in optimizer.variables]
    for apply in (optimizer.stateless_apply, jax.jit(optimizer.stateless_apply)):
        (moved,), _ = apply(state, [jax.numpy.asarray(gradient)], [variable.value])
        np.testing.assert_allclose(moved, [-(hvd.size() + 1) / 2] * 3)


def check_sharded_optimizers_are_refused() -> None:
    if on("jax"):
        make = functools.partial(hvd.DistributedOptimizer, OPTIMIZERS["Adam"](), sharded=True)
        require_error(NotImplementedError, make, "not on JAX")


def check_values_and_neutral_front() -> None:
    rank, size = hvd.rank(), hvd.size()
    np.testing.assert_allclose(keras.ops.convert_to_numpy(hvd.allreduce([float(rank)])), [(size - 1) / 2])
    scattered = hvd.reducescatter(np.ones((size, 2), "float32"), op=hvd.Sum)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(scattered), [[size] * 2])
    variable = keras.Variable(np.full(2, rank, "float32"))
    total = hvdlite.allreduce(variable, op=hvdlite.Sum)
    assert isinstance(total, keras.Variable)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(total), [sum(range(size))] * 2)
    rows = keras.Variable(np.full((size, 2), rank, "float32"))
    swapped = hvdlite.alltoall(rows)
    assert isinstance(swapped, keras.Variable)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(swapped), [[other] * 2 for other in range(size)])
    several = [
        (hvdlite.grouped_allreduce([rows, variable], op=hvdlite.Sum), [(size, 2), (2,)]),
        (hvdlite.grouped_allgather([rows, variable]), [(size * size, 2), (size * 2,)]),
        (hvdlite.grouped_reducescatter([rows], op=hvdlite.Sum), [(1, 2)]),
    ]
    for found, shapes in several:
        assert all(isinstance(each, keras.Variable) for each in found)
        assert [tuple(each.shape) for each in found] == shapes
    np.testing.assert_allclose(keras.ops.convert_to_numpy(several[0][0][0]), [[sum(range(size))] * 2] * size)
    hvdlite.broadcast_variables([variable], root_rank=1)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), [1.0] * 2)


def check_save_and_load() -> None:
    trained = fit(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), share(), BATCH // hvd.size())
    with tempfile.TemporaryDirectory() as folder:
        trained.save(Path(folder) / "model.keras")
        loaded = hvd.load_model(Path(folder) / "model.keras")
    x, y = data()
    for each in (trained, loaded):
        each.fit(x[share()], y[share()], batch_size=BATCH // hvd.size(), shuffle=False, verbose=0)
    require_close(weights(loaded), weights(trained), "trained on", 0)


def check_another_model_on_one_rank() -> None:
    width = 5 if last() else 4

    def build() -> Any:
        return keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(width), keras.layers.Dense(2)])

    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    require_error(hvdlite.MismatchError, lambda: fit(optimizer, share(), 2, build), "parameters differ", "[6, 5]")
    np.testing.assert_allclose(hvdlite.allreduce(np.ones(2), op=hvdlite.Sum), [hvd.size()] * 2)


def check_broadcast_forgotten() -> None:
    """On PyTorch, different weights are an error in the second step. (On JAX, an epoch hides variables' values.)"""

    def build() -> Any:
        trained = model()
        trained.layers[0].bias.assign_add(np.full(8, float(last())))
        return trained

    def train() -> Any:
        return fit(hvd.DistributedOptimizer(OPTIMIZERS["SGD"]()), share(), 3, build)

    if on("torch"):
        watched.BEGIN = 2
        require_error(hvdlite.MismatchError, train, "bias (variable 1)", "broadcast_variables")


def check_a_step_in_which_weights_would_be_compared() -> None:
    """With the callback, steps compare no weights, and Keras' state on JAX stays unchanged."""
    before, watched.BEGIN = watched.BEGIN, 2
    try:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["SGD"]())
        trained = model()
        trained.compile(optimizer, "mse")
        x, y = data()
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        trained.fit(x[share()], y[share()], batch_size=3, epochs=2, verbose=0, callbacks=callbacks)
    finally:
        watched.BEGIN = before
    require_same_bits(weights(trained))


def check_local_layers() -> None:
    """The gradients of local layers stay each rank's own; all other gradients are reduced."""
    trained = model()
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.05), local_layers=trained.layers[-1])
    trained.compile(optimizer, "mse")
    x, y = data()
    trained.fit(x[share()], y[share()], batch_size=3, verbose=0)
    body, head = weights(trained)[:-2], weights(trained)[-2:]
    require_same_bits(body)
    assert len({digest(each) for each in hvd.allgather_object(head)}) == hvd.size()


def check_fit_goes_on_after_an_error() -> None:
    """One rank fails while the others are in a step, which XLA has compiled on JAX: all return to the last commit."""
    trained, failed = model(), list[int]()
    x, y = data()
    trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.05)), "mse")
    state = hvd.elastic.KerasState(trained, epoch=0, batch=0)

    class FailOnce(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if last() and not failed and state.epoch == 1:
                failed.append(batch)
                raise hvdlite.HorovodInternalError("as if something had failed")

    @hvd.elastic.run
    def train(state: Any) -> None:
        try:
            trained.fit(
                x,
                y,
                batch_size=4,
                epochs=3 - state.epoch,
                verbose=0,
                callbacks=[
                    hvd.elastic.UpdateEpochStateCallback(state),
                    hvd.elastic.CommitStateCallback(state, 100),
                    FailOnce(),
                ],
            )
        except Exception:
            if on("jax"):
                spoil_tokens()
            raise

    train(state)
    assert state.epoch == 3
    require_same_bits([np.asarray(keras.ops.convert_to_numpy(weight)) for weight in trained.weights])


def check_batch_norm_over_all_ranks() -> None:
    if on("jax"):
        require_error(NotImplementedError, hvd.SyncBatchNormalization, "JAX")
        return
    require_one_big_batch_norm(hvd)


def check_layers_follow_what_is_broadcast() -> None:
    require_layers_that_follow(hvd)


def check_a_collective_in_what_jax_compiles() -> None:
    if on("jax"):
        import jax

        require_error(NotImplementedError, lambda: jax.jit(hvd.allreduce)(np.ones(2)), "outside of it")


def check_a_model_in_parts() -> None:
    """On JAX it is refused. (`backends_chain` has the checks on the other backends.)"""
    if on("jax"):
        require_error(NotImplementedError, lambda: hvd.Chain([(0, model), (1, model)]), "JAX", "KERAS_BACKEND=torch")


def check_job_metrics() -> None:
    require_job_metrics()
