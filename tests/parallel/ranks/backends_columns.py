"""Checks of a Keras model in parts whose parts train data-parallel. `test_keras_backends` runs them on four ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import hvdlite
import hvdlite.keras as hvd
from tests.parallel.chain_common import (
    BATCH,
    BODY,
    CLOSE,
    HEAD,
    data,
    dense,
    optimizer,
    part,
    require_equal,
    require_equal_logs,
    whole,
)
from tests.parallel.common import require_error

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported
NECK = part(2, (8,), dense(5, activation="tanh", activity_regularizer="l2"))


def check_two_by_two_equal_the_big_batch() -> None:
    """Also if only one rank of each part begins with the right weights, and where a rank has two parts."""
    hvd.shutdown()
    left, right = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])
    hvd.init(process_sets=[left, right])
    x, y, _ = data()
    column = slice(hvd.rank() % 2, None, 2)
    for sets, validates in (((left, right, right), True), ((left, right, left), False)):
        model, one = hvd.Chain(list(zip(sets, (BODY, NECK, HEAD), strict=True))), whole(BODY, NECK, HEAD)
        histories = []
        for each, rows, batch in ((model, column, BATCH // 2), (one, slice(None), BATCH)):
            each.compile(optimizer(), "mse", metrics=["mae"])
            mine = x[rows], y[rows]
            options = {"validation_data": mine} if validates else {}
            histories.append(each.fit(*mine, batch, 2, 0, shuffle=False, **options).history)
        require_equal_logs(*histories)
        require_equal(model, one)
    np.testing.assert_allclose(model.predict(x[column], verbose=0), one.predict(x, verbose=0)[column], atol=CLOSE)

    def spoiled() -> keras.Model:
        body = BODY()
        if hvd.rank() == 1:
            body.set_weights([weight + 1 for weight in body.get_weights()])
        return body

    require_equal(hvd.Chain([(left, spoiled), (right, NECK)]), whole(BODY, NECK))


def check_four_parts_in_a_row() -> None:
    """On four ranks they train as on one, and an error in the second part reaches all."""
    x, y, _ = data()
    parts = BODY, NECK, part(4, (5,), dense(5)), HEAD
    model, one = hvd.Chain(list(enumerate(parts))), whole(*parts)
    for each in (model, one):
        each.compile(optimizer(), "mse", run_eagerly=True)
        for _ in range(2):
            each.train_on_batch(x, y)
    require_equal(model, one)
    if hvd.rank() == 1:
        model.parts[1].call = lambda *given, **options: 1 / 0
    said = () if hvd.rank() == 1 else ("hvd.Chain: rank 1 has raised ZeroDivisionError",)
    require_error(Exception, lambda: model.train_on_batch(x, y), *said, "division by zero")
    np.testing.assert_allclose(hvdlite.allreduce(np.ones(2), op=hvdlite.Sum), [4] * 2)


def check_sets_that_do_not_fit() -> None:
    hvd.shutdown()
    left, right, others = hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3]), hvd.ProcessSet([0, 1, 2])
    hvd.init(process_sets=[left, right, others])
    cases: tuple[tuple[list[Any], str], ...] = (
        ([(others, BODY), (3, NECK)], "equally many ranks"),
        ([(others, BODY), (right, NECK)], "equally many ranks"),
        ([(left, BODY), (hvd.ProcessSet([2, 3]), NECK)], "is not registered"),
        ([(left, BODY), (right, part(2, (8,), dense(4 + hvd.rank())))], "rank 2 and rank 3 made different parts 1"),
    )
    for parts, said in cases:
        require_error(hvdlite.HvdliteError, lambda: hvd.Chain(parts), said)
    model = hvd.Chain([(left, BODY), (right, part(2, (8,), dense(2)))])
    everyones = hvd.DistributedOptimizer(optimizer())
    require_error(ValueError, lambda: model.compile(everyones, "mse"), "plain optimizer")
    own = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), process_set=left if hvd.rank() < 2 else right)
    model.compile(own, "mse")
    x, y, _ = data()
    model.fit(x[:BATCH], y[:BATCH], verbose=0)
    rows = BATCH - (hvd.rank() == 3)
    text = "rank 3 trains on a batch of 7 rows"
    require_error(Exception, lambda: model.fit(x[:rows], y[:rows], verbose=0), "hvd.Chain", text)
    np.testing.assert_allclose(hvdlite.allreduce(np.ones(2), op=hvdlite.Sum), [4] * 2)
