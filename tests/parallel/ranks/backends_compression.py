"""Lossy compression on Keras' backends, where each rank counts as a host. `test_keras_backends` runs these checks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from hvdlite.compression.codec import Codec
from hvdlite.compression.store import Store
from hvdlite.keras.attachment import attachment_of
from tests.parallel.common import last, require_error, require_same_bits

with contextlib.suppress(ImportError):
    import tensorflow as tf

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported
WIDTH, UNITS, BATCH, STEPS = 64, 32, 8, 5  # a kernel of 2048 elements is compressed
CLOSE = 1e-5  # of the largest element: float32 sums of a few steps


class Coarse(Codec):
    """A user's own compressor."""

    def encode(self, values: np.ndarray) -> Sequence[np.ndarray]:
        scale = np.abs(values).max(keepdims=True) / 7 + 1e-30
        return np.rint(values / scale).astype(np.int8), scale

    def decode(self, code: Sequence[np.ndarray], length: int) -> np.ndarray:
        return np.asarray(code[0] * code[1])


choices: Any = hvd.Compression
topk = choices.topk(ratio=0.05)
COMPRESSORS = (topk, choices.randomk(0.2), choices.int8(), choices.onebit(),
               choices.powersgd(rank=2, start_step=2), Coarse())  # fmt: skip


def on(backend: str) -> bool:
    return bool(keras.backend.backend() == backend)


def array(tensor: Any) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(tensor))


def store_of(optimizer: Any) -> Store:
    attachment = attachment_of(optimizer)
    assert attachment is not None
    (store,) = attachment.gradients.stores.known.values()
    return store


def residuals(store: Store) -> dict[str, np.ndarray]:
    return {name: store.before(name).residual.copy() for name in store.entries}


def unsent(store: Store) -> np.ndarray:
    """The sum over all ranks of what was not sent of a store's only parameter."""
    (own,) = residuals(store).values()
    assert own.any(), f"{store.compressor} was exact"
    return np.asarray(hvdlite.allreduce(own, op=hvdlite.Sum))


def over_ranks(gradient: np.ndarray) -> np.ndarray:
    return np.asarray(hvdlite.allreduce(np.asarray(gradient, np.float64), op=hvdlite.Sum))


def require_sum(found: np.ndarray, expected: np.ndarray, what: object) -> None:
    assert np.isfinite(found).all() and np.abs(expected).max() > 0, what
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < CLOSE, f"{what}: {error}"


# Models: their gradients do not depend on weights, so that the sums of all steps' gradients are known.


def product(wanted: Any, found: Any) -> Any:
    """A loss whose gradient for the result is wanted / UNITS."""
    return keras.ops.mean(wanted * found, axis=-1)


def linear() -> Any:
    layer = keras.layers.Dense(UNITS, kernel_initializer="zeros")
    return keras.Sequential([keras.layers.Input((WIDTH,)), layer])


def data(steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """This rank's rows."""
    rng = np.random.default_rng(hvd.rank())
    return tuple(rng.standard_normal((steps * BATCH, width)).astype(np.float32) for width in (WIDTH, UNITS))  # type: ignore[return-value]


def sums(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The sums over steps and ranks of the gradients of kernel and bias."""
    x, y = x.astype(np.float64), y.astype(np.float64) / (BATCH * UNITS)
    return over_ranks(x.T @ y), over_ranks(y.sum(0))


def fit(optimizer: Any, *given: np.ndarray, trained: Any = None, **compiled: Any) -> Any:
    trained = trained or linear()
    if not trained.compiled:
        trained.compile(optimizer, product, **compiled)
    trained.fit(*given, batch_size=BATCH, shuffle=False, verbose=0)
    return trained


def ways() -> list[dict[str, Any]]:
    """The ways in which the backend runs a step."""
    if on("tensorflow"):
        return [{}, {"run_eagerly": True}, {"steps_per_execution": 2}]
    return [{}, {"run_eagerly": True}] if on("jax") else [{}]


# The checks


def check_every_compressor_trains() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8 * BATCH, WIDTH)).astype(np.float32)
    y = x @ rng.standard_normal((WIDTH, UNITS)).astype(np.float32) / 8
    mine = slice(hvd.rank(), None, hvd.size())
    for compression in COMPRESSORS:
        keras.utils.set_random_seed(1)
        trained = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(UNITS), keras.layers.Dense(UNITS)])
        trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=compression), "mse")
        found = trained.fit(x[mine], y[mine], batch_size=BATCH, epochs=4, shuffle=False, verbose=0).history["loss"]
        assert found[-1] < 0.9 * found[0] and np.isfinite(found).all(), f"{compression}: {found}"
        require_same_bits([array(each) for each in trained.weights])
        store = store_of(trained.optimizer)
        assert len(store.entries) == 2 and store.rounds == 4 * 8 // hvd.size(), compression
        assert any(each.any() for each in residuals(store).values()), f"{compression} was exact"


def check_names_of_compressors() -> None:
    assert repr(topk) == "hvd.Compression.topk(ratio=0.05)", repr(topk)
    assert repr(Coarse()) == "Coarse()" and choices.Codec is Codec
    for compression, name in zip(COMPRESSORS, ("topk", "randomk", "int8", "onebit", "powersgd"), strict=False):
        assert repr(compression).startswith(f"hvd.Compression.{name}("), compression


def check_nothing_is_lost() -> None:
    x, y = data()
    kernel, bias = sums(x, y)
    cases = [(each, {}) for each in COMPRESSORS] + [(topk, way) for way in ways()[1:]]
    for compression, compiled in cases:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=compression, op=hvd.Sum)
        trained = fit(optimizer, x, y, **compiled)
        found = [array(each) for each in trained.weights]
        require_same_bits(found)
        left = unsent(store_of(optimizer)).reshape(WIDTH, UNITS)
        require_sum(left - found[0], kernel, (compression, compiled))
        require_sum(-found[1], bias, (compression, compiled))
        assert store_of(optimizer).rounds == STEPS


def check_averages_and_sharded_optimizers() -> None:
    x, y = data()
    kernel, _ = sums(x, y)
    cases: list[dict[str, Any]] = [{}, {"gradient_predivide_factor": 2.0}, *([] if on("jax") else [{"sharded": True}])]
    for options in cases:
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=topk, **options)
        trained = fit(optimizer, x, y)
        left = unsent(store_of(optimizer)).reshape(WIDTH, UNITS)
        require_sum(left - hvd.size() * array(trained.weights[0]), kernel, options)


def check_growing_loss_scales_and_skipped_steps() -> None:
    """The scale changes in the middle of a fit, and a step with an infinite gradient on one rank changes nothing."""
    x, y = data(2 * STEPS)
    kernel, bias = sums(x, y)
    half = STEPS * BATCH
    bad = x[:BATCH].copy()
    if last():
        bad[0, 0] = np.inf
    for compiled in ways():
        scaler = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(1.0), initial_scale=16.0, dynamic_growth_steps=2
        )
        optimizer = hvd.DistributedOptimizer(scaler, compression=topk, op=hvd.Sum)
        trained = fit(optimizer, x[:half], y[:half], **compiled)
        store = store_of(optimizer)
        assert float(array(scaler.dynamic_scale)) == 64.0
        before, weights = residuals(store), [array(each) for each in trained.weights]

        fit(optimizer, bad, y[:BATCH], trained=trained)
        assert float(array(scaler.dynamic_scale)) == 32.0 and store.rounds == STEPS
        for name, kept in residuals(store).items():
            np.testing.assert_array_equal(kept, before[name])
        for variable, value in zip(trained.weights, weights, strict=True):
            np.testing.assert_array_equal(array(variable), value)

        fit(optimizer, x[half:], y[half:], trained=trained)
        assert float(array(scaler.dynamic_scale)) == 128.0 and store.rounds == 2 * STEPS
        left = unsent(store).reshape(WIDTH, UNITS)
        require_sum(left - array(trained.weights[0]), kernel, compiled)
        require_sum(-array(trained.weights[1]), bias, compiled)


def check_loss_scales_of_plain_optimizers() -> None:
    """`loss_scale_factor` is a scale, too: what was not sent is kept without it."""
    x, y = data()
    kernel, _ = sums(x, y)
    optimizer = keras.optimizers.SGD(1.0, loss_scale_factor=8.0)
    trained = fit(hvd.DistributedOptimizer(optimizer, compression=topk, op=hvd.Sum), x, y)
    require_sum(unsent(store_of(optimizer)).reshape(WIDTH, UNITS) - array(trained.weights[0]), kernel, "factor")


def check_refusals() -> None:
    make = keras.optimizers.SGD
    for op in (hvd.Min, hvd.Max, hvd.Product):
        require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), compression=topk, op=op), "op=")
    text = require_error(ValueError, lambda: hvd.DistributedOptimizer(make(), compression=Coarse))
    assert "Coarse()" in text
    for value in (topk, Coarse()):
        require_error(ValueError, lambda: hvd.allreduce(np.ones(3), compression=value), "single collective")


def check_ranks_with_different_compressors() -> None:
    compression = choices.topk(0.05 if last() else 0.1)
    optimizer, variable = keras.optimizers.SGD(1.0), keras.Variable(np.zeros((WIDTH, UNITS), "float32"))
    optimizer.build([variable])
    hvd.DistributedOptimizer(optimizer, compression=compression)
    kinds: tuple[type[BaseException], ...] = (hvdlite.MismatchError,)
    if on("tensorflow"):
        kinds = (hvdlite.MismatchError, tf.errors.FailedPreconditionError)
    require_error(kinds, lambda: optimizer.apply([keras.ops.ones((WIDTH, UNITS))], [variable]), "topk(ratio=0.1)")


def check_several_passes_per_step() -> None:
    x, y = data(4)
    kernel, bias = sums(x, y)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=topk, op=hvd.Sum, backward_passes_per_step=2
    )
    trained = fit(optimizer, x, y, run_eagerly=on("jax"))
    assert store_of(optimizer).rounds == 2
    require_sum(unsent(store_of(optimizer)).reshape(WIDTH, UNITS) - array(trained.weights[0]), kernel, "passes")
    require_sum(-array(trained.weights[1]), bias, "passes")


def check_scaled_passes() -> None:
    """Several passes under a growing loss scale."""
    x, y = data(8)
    kernel, _ = sums(x, y)
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0, dynamic_growth_steps=2)
    optimizer = hvd.DistributedOptimizer(scaler, compression=topk, op=hvd.Sum, backward_passes_per_step=2)
    trained = fit(optimizer, x, y, run_eagerly=on("jax"))
    assert float(array(scaler.dynamic_scale)) == 16.0
    require_sum(unsent(store_of(optimizer)).reshape(WIDTH, UNITS) - array(trained.weights[0]), kernel, "passes")


def check_local_layers() -> None:
    """A local layer's gradients stay exact and this rank's own; the others are compressed."""
    x, y = data()

    def two() -> Any:
        keras.utils.set_random_seed(1)
        first = keras.layers.Dense(UNITS, use_bias=False)
        return keras.Sequential([keras.layers.Input((WIDTH,)), first, keras.layers.Dense(UNITS, use_bias=False)])

    trained = two()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=topk, op=hvd.Sum, local_layers=trained.layers[0]
    )
    (first, second) = (array(each) for each in trained.weights)
    fit(optimizer, x[:BATCH], y[:BATCH], trained=trained)
    upstream = y[:BATCH].astype(np.float64) / (BATCH * UNITS)
    local = x[:BATCH].T @ (upstream @ second.T.astype(np.float64)) / hvd.size()
    np.testing.assert_allclose(first - array(trained.weights[0]), local, rtol=1e-3, atol=1e-6)
    store = store_of(optimizer)
    assert len(store.entries) == 1
    common = over_ranks((x[:BATCH] @ first).T @ upstream)
    found = unsent(store).reshape(UNITS, UNITS) + second - array(trained.weights[1])
    np.testing.assert_allclose(found, common, atol=1e-4 * np.abs(common).max())


def check_variables_keep_their_numbers() -> None:
    """Another way to run the step makes another exchange, with what the first one has kept: also on JAX, where each
    step outside of fit gives a variable another array."""
    x, y = data()
    kernel, _ = sums(np.concatenate([x] * 3), np.concatenate([y] * 3))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=topk, op=hvd.Sum)
    trained = linear()
    for eagerly in (False, True, False):
        trained.compile(optimizer, product, run_eagerly=eagerly)
        trained.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        store = store_of(optimizer)
        assert len(store.entries) == 1, list(store.entries)
    shape, variables = (WIDTH, UNITS), trained.trainable_variables
    for _ in range(3):
        optimizer.apply([keras.ops.ones(shape), keras.ops.ones((UNITS,))], variables)
    kernel += hvd.size() * 3
    assert store.rounds == 3 * STEPS + 3 and len(store.entries) == 1, list(store.entries)
    require_sum(unsent(store).reshape(WIDTH, UNITS) - array(trained.weights[0]), kernel, "numbers")


def check_compiled_steps_without_some_gradients() -> None:
    """What was not sent of a variable stays if a compiled step has no gradient for it: it has no result either."""
    if not on("jax"):
        return
    import jax

    variables = [keras.Variable(np.zeros((WIDTH, UNITS), "float32")) for _ in range(2)]
    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build(variables)
    compression = choices.topk(ratio=0.3)  # so large a part that it has some elements of the unused variable
    hvd.DistributedOptimizer(optimizer, compression=compression, op=hvd.Sum)
    step = jax.jit(optimizer.stateless_apply)
    state, values = [each.value for each in optimizer.variables], [each.value for each in variables]
    random, given = np.random.default_rng(hvd.rank()), np.zeros((2, WIDTH, UNITS))
    for used in (2, 1, 1, 2):
        gradients = random.standard_normal((used, WIDTH, UNITS)).astype(np.float32)
        given[:used] += gradients
        values, state = step(state, [*gradients, *[None] * (2 - used)], values)
    store = store_of(optimizer)
    for name, value, mine in zip(store.entries, values, given, strict=True):
        kept = hvdlite.allreduce(store.before(name).residual.copy(), op=hvdlite.Sum).reshape(WIDTH, UNITS)
        require_sum(kept - array(value), over_ranks(mine), name)
