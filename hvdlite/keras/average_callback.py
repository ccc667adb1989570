"""A callback that has Keras evaluate the average of all ranks' models."""

from __future__ import annotations

import keras

from hvdlite.keras.logs import Logs
from hvdlite.keras.strategy.average import AveragedParameters, average_parameters


class AverageParametersCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages the model over the ranks for each evaluation: validation in fit(), and evaluate().

    For training with a strategy (`hvd.DistributedOptimizer(..., strategy=...)`). Give the callback to every rank, and
    validation data, too: it waits for all ranks when an evaluation begins. Afterwards each rank goes on with its own
    weights. See `hvd.average_parameters`.

    Attributes:
        averaged: The average in use; None outside of evaluations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.averaged: AveragedParameters | None = None

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self.averaged = average_parameters(self.model)

    def on_test_end(self, logs: Logs | None = None) -> None:
        averaged, self.averaged = self.averaged, None
        if averaged is not None:
            averaged.restore()
