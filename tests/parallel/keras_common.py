"""Training on one process and on all ranks: helpers for the checks of Keras on each backend.

The data are small whole numbers, and the ranks' batches have equal sizes. So N ranks with batches of B rows and one
process with batches of N * B rows differ only by the order of float32 sums.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdlite as hvd
import hvdlite.keras
from hvdlite.job import runtime
from tests.parallel.common import require_error, require_same_bits

STEPS, BATCH, WIDTH = 6, 12, 6  # 1, 2, 3 and 4 divide 12 rows
CLOSE = 1e-5  # relative to weights of about 1: some 100 roundings of 6e-8
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(
        0.01, epsilon=1e-3
    ),  # with the default epsilon, rounding errors are divided by rounding errors
}


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (STEPS * BATCH, WIDTH)).astype(np.float32)
    return x, (x[:, :2] - x[:, 2:4] + 1).astype(np.float32)


def share() -> np.ndarray:
    """Return the indices of this rank's rows: an equal part of each batch."""
    part = BATCH // hvd.size()
    start = np.arange(STEPS)[:, None] * BATCH + hvd.rank() * part
    return (start + np.arange(part)).reshape(-1)


def model() -> Any:
    """Return a model with the same weights on every rank and at each call."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.layers.Input((WIDTH,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)]
    )


def weights(trained: Any) -> list[np.ndarray]:
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in trained.trainable_variables]


def alone(train: Callable[[], Any]) -> Any:
    """Run train() on rank 0 only, and return its result on every rank."""
    return hvd.broadcast_object(train() if hvd.rank() == 0 else None, 0)


def require_close(ours: list[np.ndarray], expected: list[np.ndarray], what: str, tolerance: float = CLOSE) -> None:
    for a, b in zip(ours, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=what)
    require_same_bits(ours)


def fit(optimizer: Any, rows: Any = slice(None), batch: int = BATCH, build: Any = model, **compiled: Any) -> Any:
    trained = build()
    trained.compile(optimizer, "mse", **compiled)
    x, y = data()
    trained.fit(x[rows], y[rows], batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return trained


def both(
    make: Callable[[], Any],
    build: Any = model,
    tolerance: float = CLOSE,
    batch: int | None = None,
    compiled: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Fit on one process with whole batches, and on all ranks with shares: weights are equal. Return the ranks' model."""
    expected = alone(lambda: weights(fit(make(), build=build, **(compiled or {}))))
    optimizer = make()
    assert hvd.DistributedOptimizer(optimizer, **arguments) is optimizer
    together = fit(optimizer, share(), batch or BATCH // hvd.size(), build, **(compiled or {}))
    require_close(weights(together), expected, f"{optimizer.name} {arguments} {compiled}", tolerance)
    return together


def require_one_big_batch_norm(module: Any) -> None:
    """module.SyncBatchNormalization trains as one process does with the whole batch, also if the ranks' batches differ in
    size."""

    def build(norm: Any) -> Any:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8), norm(), keras.layers.Dense(2)]
        return keras.Sequential([keras.layers.Input((WIDTH,)), *layers])

    make, plain = OPTIMIZERS["momentum"], keras.layers.BatchNormalization
    expected = alone(lambda: weights(fit(make(), build=lambda: build(plain))))
    optimizer = module.DistributedOptimizer(make())
    together = fit(optimizer, share(), BATCH // hvd.size(), lambda: build(module.SyncBatchNormalization))
    require_close(weights(together), expected, "batch norm", 1e-4)
    require_same_bits([np.array(keras.ops.convert_to_numpy(v)) for v in together.non_trainable_variables[:2]])
    layer = module.SyncBatchNormalization()
    x, mine = data()[0], slice(0, 5) if hvd.rank() == 0 else slice(5, 12)
    whole = plain()(x[:12], training=True)
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(layer(x[mine], training=True)), keras.ops.convert_to_numpy(whole)[mine], atol=1e-5
    )
    require_error(ValueError, lambda: module.SyncBatchNormalization(fused=True), "fused")


def require_resuming(module: Any) -> None:
    """Training resumes bit for bit from a file that only rank 0 can read, also within `fit`. A failed write, and a state
    that does not fit the file, are errors on every rank."""

    def build(seed: int, kind: str) -> Any:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Normalization(), keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.5)]
        built = keras.Sequential([keras.layers.Input((WIDTH,)), *layers, keras.layers.Dense(2)])
        built.compile(module.DistributedOptimizer(OPTIMIZERS[kind]()), "mse")
        return built

    def fit_on(trained: Any, first: int, last: int, *callbacks: Any) -> list[np.ndarray]:
        trained.fit(
            x, y, batch_size=4, shuffle=False, verbose=0, initial_epoch=first, epochs=last, callbacks=list(callbacks)
        )
        return [np.array(each.numpy()) for each in [*trained.weights, *trained.optimizer.variables]]

    x, y = (each[share()][:12] for each in data())
    for kind in ("momentum", "Adam"):
        with tempfile.TemporaryDirectory() as name:
            path = Path(name if hvd.rank() == 0 else "/nowhere/at/all") / "run"
            hvd.barrier()
            run, again = build(3, kind), build(4 + hvd.rank(), kind)
            run.layers[0].adapt(data()[0])
            assert module.load(path, missing_ok=True, model=run, epoch=0) == {"epoch": 0}
            fit_on(run, 0, 2, module.callbacks.BroadcastGlobalVariablesCallback(0), keras.callbacks.LambdaCallback(
                on_epoch_end=lambda epoch, logs: module.save(path, rng=True, model=run, epoch=epoch + 1)))  # fmt: skip
            wanted = fit_on(run, 2, 4)
            if keras.backend.backend() == "torch":  # the first fit on PyTorch draws random numbers to try the model
                fit_on(again, 0, 1)
            assert module.load(path, rng=True, missing_ok=True, model=again, epoch=0) == {"epoch": 2}
            found = fit_on(again, 2, 4)
            assert all(map(np.array_equal, found, wanted)) and len(found) == len(wanted), kind
            require_same_bits(found)

            small = keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Dense(2)])
            require_error(ValueError, lambda: module.load(path, model=small), "variables")
            require_error(ValueError, lambda: module.load(path, other=again), "no other: it has epoch, ", "model")
            require_error(TypeError, lambda: module.save(path, model=again, odd=object()), "'odd' (object)")
            require_error(OSError, lambda: module.save(path / "below", model=again), "hvd.save: rank 0")
            assert module.load(path)["epoch"] == 2
            assert hvd.rank() or [each.name for each in path.parent.iterdir()] == ["run"]
            hvd.barrier()


def require_layers_that_follow(module: Any) -> None:
    """Normalization layers compute with statistics that only rank 0 has adapted: from the first step on, in a step that
    was compiled with other statistics, and after a broadcast of a list of variables."""
    x, y = data()

    def build() -> Any:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Input((WIDTH,)), keras.layers.Normalization(), keras.layers.Dense(2)])

    def fits(optimizer: Any, adapts: bool, rows: Any, batch: int, callbacks: list[Any]) -> list[np.ndarray]:
        trained = build()
        trained.compile(optimizer, "mse")
        for factor in (3.0, 5.0):
            if adapts:
                trained.layers[0].adapt(factor * x + 1)
                trained.make_train_function(force=True)
            trained.fit(x[rows], y[rows], batch_size=batch, shuffle=False, verbose=0, callbacks=callbacks)
        return weights(trained)

    expected = alone(lambda: fits(OPTIMIZERS["SGD"](), True, slice(None), BATCH, []))
    optimizer = module.DistributedOptimizer(OPTIMIZERS["SGD"]())
    callbacks = [module.callbacks.BroadcastGlobalVariablesCallback(0)]
    together = fits(optimizer, hvd.rank() == 0, share(), BATCH // hvd.size(), callbacks)
    require_close(together, expected, "normalization", 1e-4)

    listed = build()
    listed.layers[0].adapt(x + hvd.rank())
    module.broadcast_variables(listed.variables, root_rank=0)
    require_same_bits([np.array(keras.ops.convert_to_numpy(listed(x)))])


def require_job_metrics() -> None:
    """JobMetricsCallback adds its numbers to the history, and steps count once, with and without a strategy."""
    for strategy in (None, hvd.LocalSGD(sync_every=2)):
        hvd.shutdown()
        hvd.init()
        if strategy and keras.backend.backend() == "jax":
            continue
        trained = model()
        trained.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), strategy=strategy), "mse")
        x, y = data()
        rows, names = share(), ("steps_per_s", "exposed_comm_pct", "peak_memory_mb")
        callback = hvdlite.keras.callbacks.JobMetricsCallback(names)
        told = trained.fit(
            x[rows], y[rows], BATCH // hvd.size(), epochs=2, shuffle=False, verbose=0, callbacks=[callback]
        )
        for name in names:
            found = told.history[f"hvdlite/{name}"]
            assert len(found) == 2 and found[0] > 0, (name, found)
            assert len(set(hvd.allgather_object(str(found)))) == 1, name
        assert runtime.current().observers.steps.number == 2 * STEPS, strategy
        wrong = [hvdlite.keras.callbacks.JobMetricsCallback(("speed",))]
        fit_again = functools.partial(trained.fit, x[rows], y[rows], BATCH // hvd.size(), verbose=0, callbacks=wrong)
        require_error(ValueError, fit_again, "hvd.metrics() has no 'speed'")
