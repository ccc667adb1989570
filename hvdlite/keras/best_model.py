"""Horovod's callback that keeps the best model only."""

from __future__ import annotations

import keras

from hvdlite.keras.logs import Logs


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ModelCheckpoint that keeps the best model only. Its `filepath` may be set later, before training.

    The callback does not communicate. Give it to one rank only, or a `filepath` of its own to each rank.

    Raises, in fit():
        ValueError: `filepath` has not been set.
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
        """
        Args:
            monitor: The metric that decides which model is best.
            verbose: 1 prints a line for each saved model.
            mode: "min", "max", or "auto", which infers it from the metric's name.
            save_freq: "epoch", or a number of batches between looks.
            save_weights_only: Whether to save the weights without the model.
            filepath: The file; may be set later as an attribute.
        """
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath or f"unset{ending}", monitor=monitor, verbose=verbose, save_best_only=True,
            save_weights_only=save_weights_only, mode=mode, save_freq=save_freq,
        )  # fmt: skip
        self.filepath = filepath

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if self.filepath is None:
            raise ValueError(
                'BestModelCheckpoint has no filepath: set it before training (callback.filepath = "best.keras")'
            )
        super().on_train_begin(logs)
