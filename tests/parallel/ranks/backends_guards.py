"""Checks that no rank trains alone without an error: on each of Keras' backends, and on other versions of Keras.
`test_keras_backends` runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from hvdlite.keras import private_api
from hvdlite.strategies import Strategy
from tests.parallel.common import require_error
from tests.parallel.keras_common import BATCH, OPTIMIZERS, both, data, model, share, weights

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported
BUILT_IN = ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lamb", "Lion", "Muon", "Nadam",
            "RMSprop", "SGD")  # fmt: skip
REFUSED = "not reduced over all ranks"


def on(backend: str) -> bool:
    return bool(keras.backend.backend() == backend)


@contextlib.contextmanager
def without(name: str, kind: type) -> Iterator[None]:
    """Return a context in which a class lacks a method."""
    owners = [each for each in kind.__mro__ if name in vars(each)]
    before = [vars(each)[name] for each in owners]
    for each in owners:
        delattr(each, name)
    try:
        yield
    finally:
        for each, method in zip(owners, before, strict=True):
            setattr(each, name, method)


def check_fit() -> None:
    both(OPTIMIZERS["momentum"])


def check_options_see_averaged_gradients() -> None:
    both(lambda: keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.1, use_ema=True))
    both(lambda: keras.optimizers.LossScaleOptimizer(OPTIMIZERS["momentum"](), initial_scale=4.0))


def check_a_fit_that_passes_by_what_reduces_is_refused() -> None:
    """A step that does not call the instance's `apply` is an error, as on a Keras that no longer calls it."""
    trained = model()
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"]())
    del optimizer.__dict__["apply"]
    trained.compile(optimizer, "mse")
    before = weights(trained)
    x, y = data()
    fit = lambda: trained.fit(x[share()], y[share()], batch_size=BATCH // hvd.size(), verbose=0)  # noqa: E731
    require_error(RuntimeError, fit, REFUSED, "SGD")
    if not on("jax"):  # on JAX, the failed step holds the variables' values
        for a, b in zip(before, weights(trained), strict=True):
            np.testing.assert_array_equal(a, b)


def check_no_built_in_optimizer_passes_the_guard_by() -> None:
    """Every built-in optimizer calls a guarded method. On PyTorch, each has its own update."""
    for kind in (getattr(keras.optimizers, name) for name in BUILT_IN if hasattr(keras.optimizers, name)):
        variable = keras.Variable(np.ones((2, 2), "float32"))
        optimizer = kind(0.1)
        optimizer.build([variable])
        hvd.DistributedOptimizer(optimizer)
        gradient = keras.ops.ones((2, 2))
        require_error(RuntimeError, lambda: type(optimizer).apply(optimizer, [gradient], [variable]), REFUSED)
        for method in private_api.guards(optimizer):
            require_error(RuntimeError, lambda: getattr(optimizer, method)([gradient], [variable], 0.1), REFUSED)
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), 1.0)
        optimizer.apply([gradient], [variable])
        assert (keras.ops.convert_to_numpy(variable) != 1.0).all(), kind


def check_a_stateless_step_without_reduction_is_refused() -> None:
    if not on("jax"):
        return
    import jax

    variable = keras.Variable(np.zeros(3, "float32"))
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([variable])
    hvd.DistributedOptimizer(optimizer)
    del optimizer.__dict__["apply"]
    state = [each.value for each in optimizer.variables]
    for apply in (optimizer.stateless_apply, jax.jit(optimizer.stateless_apply)):
        require_error(RuntimeError, lambda: apply(state, [jax.numpy.ones(3)], [variable.value]), REFUSED)


def check_a_keras_without_the_guarded_method_is_refused() -> None:
    """The error comes at once, from DistributedOptimizer."""
    for name in private_api.GUARDED:
        with without(name.attribute, type(keras.optimizers.SGD())):
            text = require_error(hvdlite.HvdliteError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD()),
                                 f"{name.attribute} is missing", "not reduced over the ranks")  # fmt: skip
        assert keras.__version__ in text
    hvd.DistributedOptimizer(keras.optimizers.SGD())


def check_a_keras_that_does_not_call_the_guarded_method_is_refused() -> None:
    kind = type(keras.optimizers.SGD())
    private_api.require_guarded_step.cache_clear()
    kind._backend_apply_gradients = lambda self, grads, variables: None
    try:
        require_error(hvdlite.HvdliteError, lambda: hvd.DistributedOptimizer(keras.optimizers.Adam()),
                      "_backend_update_step is not called")  # fmt: skip
    finally:
        del kind._backend_apply_gradients
    hvd.DistributedOptimizer(keras.optimizers.Adam())


def check_a_distribution_of_keras_is_refused() -> None:
    """The error comes from DistributedOptimizer, or from apply() if the distribution is set later."""
    distribution: Any = object()
    if on("jax"):
        distribution = keras.distribution.DataParallel(devices=["cpu:0"])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    words = "keras.distribution", type(distribution).__name__, "one process per device"
    gradient, variable = keras.ops.ones(2), keras.Variable(np.zeros(2, "float32"))
    keras.distribution.set_distribution(distribution)
    try:
        require_error(NotImplementedError, lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), *words)
        require_error(NotImplementedError, lambda: optimizer.apply([gradient], [variable]), *words)
    finally:
        keras.distribution.set_distribution(None)
    optimizer.apply([gradient], [variable])
    np.testing.assert_allclose(keras.ops.convert_to_numpy(variable), [-0.1] * 2)


def scaled_steps() -> list[np.ndarray]:
    """Return weights and state after a fit() on this rank, with a plain LossScaleOptimizer and an infinite gradient."""
    trained = model()
    optimizer = keras.optimizers.LossScaleOptimizer(OPTIMIZERS["momentum"](), initial_scale=4.0, dynamic_growth_steps=2)
    trained.compile(optimizer, "mse")
    x, y = (each.copy() for each in data())
    x[BATCH] = np.inf  # in the second step
    trained.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return [np.array(keras.ops.convert_to_numpy(each)) for each in (*trained.weights, *optimizer.variables)]


def check_a_strategy_is_refused_on_jax() -> None:
    if on("jax"):
        make = partial(hvd.DistributedOptimizer, keras.optimizers.SGD(), strategy=Strategy())
        require_error(NotImplementedError, make, "hvd.Strategy", "not on JAX", "KERAS_BACKEND")


def check_a_scaler_that_is_not_distributed_is_as_before() -> None:
    """A plain scaler trains bit for bit as before while hvdlite has changed Keras' class; shutdown() restores the class."""
    scaler, names = keras.optimizers.LossScaleOptimizer, ("apply", "stateless_apply")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    ours, found = [vars(scaler)[name] for name in names], scaled_steps()
    hvd.shutdown()
    plain = [vars(scaler)[name] for name in names]
    assert all(each.__module__.startswith("keras.") for each in plain)
    expected = scaled_steps()
    for a, b in zip(found, expected, strict=True):
        assert a.tobytes() == b.tobytes()
    hvd.init()
    assert all(vars(scaler)[name] not in plain for name in names)  # an attached optimizer may still exist
    assert not set(ours) & set(plain)
    del optimizer
