"""Fit after one error and after a second: the epochs, batches and learning rates that follow."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import hvdlite.tensorflow.keras as hvd
from hvdlite import HvdliteError

SIZES = (2,)
BATCHES = 10


class FailAt(keras.callbacks.Callback):
    """Raises an error once before each of these (epoch, batch within the epoch)."""

    def __init__(self, places: list[tuple[int, int]], state: Any, left_out: int = 0) -> None:
        super().__init__()
        self.places, self.state, self.left_out = places, state, left_out

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if (place := (self.state.epoch, batch + self.left_out)) in self.places:
            self.places.remove(place)
            raise HvdliteError(f"as if something had failed at {place}")


def counting() -> tuple[Any, Any]:
    """Return a model whose weights count the trainings of each of ten batches, and its state."""
    model = keras.Sequential([
        keras.Input((BATCHES,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])  # fmt: skip
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)), lambda wanted, found: wanted - found)
    return model, hvd.elastic.KerasState(model, epoch=0, batch=0)


def fit(model: Any, callbacks: list[Any], left_out: int = 0, **epochs: int) -> None:
    x, y = np.eye(BATCHES, dtype="f4")[left_out:], np.zeros((BATCHES - left_out, 1), "f4")
    model.fit(x, y, batch_size=1, shuffle=False, verbose=0, callbacks=callbacks, **epochs)


def check_both_ways_to_resume_count_epochs() -> None:
    """With initial_epoch a schedule continues, too."""
    for first in (True, False):
        model, state = counting()
        places, rates = [(1, 4), (3, 0)], list[float]()

        @hvd.elastic.run
        def train(
            state: Any, first: bool = first, model: Any = model, places: Any = places, rates: Any = rates
        ) -> None:
            fit(model, [
                FailAt(places, state),
                hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.5**epoch, momentum_correction=False),
                hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, 100),
                keras.callbacks.LambdaCallback(on_epoch_end=lambda _, logs: rates.append(logs["lr"])),
            ], **({"initial_epoch": state.epoch, "epochs": 5} if first else {"epochs": 5 - state.epoch}))  # fmt: skip

        train(state)
        assert not places and state.epoch == 5, (first, state.epoch)
        assert rates == ([1.0, 0.5, 0.25, 0.125, 0.0625] if first else [1.0, 1.0, 0.5, 1.0, 0.5]), (first, rates)


def check_an_epoch_that_fails_twice_leaves_no_batch_out() -> None:
    """No batch is trained twice either, if the script follows the docstring of UpdateBatchStateCallback."""
    model, state = counting()
    places = [(0, 4), (0, 7), (1, 0)]

    def callbacks(left_out: int = 0) -> list[Any]:
        return [
            FailAt(places, state, left_out), hvd.elastic.UpdateBatchStateCallback(state, left_out=left_out),
            hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state),
        ]  # fmt: skip

    @hvd.elastic.run
    def train(state: Any) -> None:
        done = state.batch + 1 if state.batch else 0
        if done:
            fit(model, callbacks(done), done, initial_epoch=state.epoch, epochs=state.epoch + 1)
        fit(model, callbacks(), initial_epoch=state.epoch, epochs=2)

    train(state)
    assert not places and (state.epoch, state.batch) == (2, 0)
    assert model.get_weights()[0].ravel().tolist() == [2.0] * BATCHES
