"""The callbacks under Horovod's other name for them, where one takes its arguments in another order."""

from __future__ import annotations

from typing import Any

from hvdlite.keras import callbacks
from hvdlite.keras.callbacks import (
    BroadcastGlobalVariablesCallback,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """A ModelCheckpoint that keeps the best model only. Its `filepath` may be set later, before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
        filepath: str | None = None,
    ) -> None:
        super().__init__(
            monitor=monitor, verbose=verbose, mode=mode, save_freq=save_freq, save_weights_only=save_weights_only,
            filepath=filepath,
        )  # fmt: skip
