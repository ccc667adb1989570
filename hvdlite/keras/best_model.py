"""Horovod's callback that keeps the best model only."""

from __future__ import annotations

import keras

from hvdlite.keras.consistency_callback import Logs


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ModelCheckpoint that keeps the best model only. Its `filepath` may be set later, before training.

    Raises ValueError in fit() when it has none.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
        filepath: str | None = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{ending}", monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )  # fmt: skip
        self.filepath = filepath

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath before training")
        super().on_train_begin(logs)
