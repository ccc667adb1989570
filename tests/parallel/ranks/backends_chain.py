"""Two checks of a Keras model in parts on two ranks: it trains as one process does, and errors reach all ranks.

`test_keras_backends` runs them.
"""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import hvdlite.keras as hvd
from tests.parallel.chain_common import (
    BATCH,
    BODY,
    CLOSE,
    HEAD,
    NECK,
    data,
    optimizer,
    require_equal,
    require_equal_logs,
    whole,
)
from tests.parallel.common import require_error

SIZES = ()  # test_keras_backends runs this module: KERAS_BACKEND must be set before Keras is imported


def check_two_ranks_equal_one_process() -> None:
    """In weights and logs. Data are shuffled, and rank 1 shuffles in another order; the last batch is smaller."""
    x, y, weights = data()
    model, one = hvd.Chain([(0, BODY), (1, NECK), (1, HEAD)]), whole(BODY, NECK, HEAD)
    histories = []
    for each in (model, one):
        each.compile(optimizer(), "mse", metrics=["mae"], weighted_metrics=["mse"])
        other = each is model and hvd.rank() == 1
        keras.utils.set_random_seed(5 + other)
        mine = (x, np.zeros_like(y), np.zeros_like(weights)) if other else (x, y, weights)
        fitted = each.fit(*mine[:2], BATCH, 3, 0, sample_weight=mine[2], validation_data=mine)
        histories.append(fitted.history)
    require_equal_logs(*histories)
    require_equal(model, one)
    np.testing.assert_allclose(model.predict(x, verbose=0), one.predict(x, verbose=0), rtol=CLOSE, atol=CLOSE)
    found, expected = (each.evaluate(x, y, verbose=0, return_dict=True) for each in (model, one))
    require_equal_logs(found, expected)


def check_an_error_on_one_rank() -> None:
    """Rank 1 fails after the first of two batches, or before rank 0 begins. Rank 0 gets an error; both can go on."""
    x, y, _ = data()

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if hvd.rank() == 1:
                raise ArithmeticError("no luck")

    model = hvd.Chain([(0, BODY), (1, NECK)])
    model.compile("sgd", "mse")
    told = ("hvd.Chain: rank 1 has raised ArithmeticError: ",) if hvd.rank() == 0 else ()
    x, y = x[: 2 * BATCH], y[: 2 * BATCH, [0] * 5]
    require_error(Exception, lambda: model.fit(x, y, BATCH, verbose=0, callbacks=[Fails()]), *told, "no luck")
    assert hvd.allgather_object(hvd.rank()) == [0, 1]
    if hvd.rank() == 0:
        time.sleep(0.5)  # rank 1 has begun its next call before this rank gets the error
    require_error(Exception, lambda: model.fit(x, y[hvd.rank() :], verbose=0))
    model.train_on_batch(x, y)
