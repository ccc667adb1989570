"""Horovod's `horovod.tensorflow.keras.callbacks`: `BestModelCheckpoint` has its arguments in another order."""

from __future__ import annotations

from hvdlite.keras import callbacks
from hvdlite.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    JobMetricsCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "JobMetricsCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """A ModelCheckpoint that keeps the best model only. A script may set `filepath` later, before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | None = None,
    ) -> None:
        """Make the callback.

        Args:
            monitor: The metric that decides.
            verbose: 1 to print a line when a model is saved, else 0.
            save_weights_only: Whether to save weights instead of the whole model.
            mode: "min", "max" or "auto": whether a smaller metric is better.
            save_freq: "epoch", or a number of batches.
            filepath: The file to write. None: the script sets the attribute `filepath` before training.
        """
        super().__init__(
            monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, save_weights_only=save_weights_only,
            filepath=filepath,
        )  # fmt: skip
