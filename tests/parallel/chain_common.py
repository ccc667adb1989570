"""A small model in three parts and its data, on ranks and on one process: helpers for the checks of `hvd.Chain`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

import hvdlite.keras as hvd

CLOSE = 1e-6
ROWS, WIDTH, BATCH = 44, 6, 8  # the last batch has 4 rows
Part = Callable[[], keras.Model]


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs, labels and sample weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
    return x, (x[:, :2] * x[:, 2:4]).astype("float32"), rng.uniform(0.5, 1.5, ROWS).astype("float32")


def part(seed: int, shape: tuple[int, ...], *layers: Callable[[], keras.Layer]) -> Part:
    """Return a function that makes a part with the same weights at each call."""

    def make() -> keras.Model:
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input(shape), *(layer() for layer in layers)], name=f"part{seed}")

    return make


def dense(width: int, **options: Any) -> Callable[[], keras.Layer]:
    return lambda: keras.layers.Dense(width, **options)


BODY = part(1, (WIDTH,), dense(8, activation="tanh", kernel_regularizer="l2"))
NECK = part(2, (8,), dense(5, activation="tanh", activity_regularizer="l2"), keras.layers.BatchNormalization)
HEAD = part(3, (5,), dense(2, kernel_regularizer="l2"))


def whole(*parts: Part) -> keras.Model:
    return keras.Sequential([make() for make in parts])


def optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adam(0.01, epsilon=1e-3)  # the default epsilon would enlarge rounding errors


def require_equal(chain: hvd.Chain, one: keras.Model) -> None:
    for number, mine in chain.parts.items():
        for ours, expected in zip(mine.get_weights(), one.layers[number].get_weights(), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=CLOSE, atol=CLOSE, err_msg=f"part {number}")


def require_equal_logs(ours: dict[str, Sequence[float]], expected: dict[str, Sequence[float]]) -> None:
    assert ours.keys() == expected.keys(), (ours, expected)
    for name, values in expected.items():
        np.testing.assert_allclose(ours[name], values, rtol=CLOSE, atol=CLOSE, err_msg=name)
    assert len(set(map(str, hvd.allgather_object(ours)))) == 1, "ranks log different values"
