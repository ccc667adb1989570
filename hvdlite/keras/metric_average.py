"""Horovod's callback that averages metrics over the ranks."""

from __future__ import annotations

import keras
import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.keras.logs import Logs, MutableLogs
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics in `logs` over the ranks at the end of each epoch.

    Give the callback to every rank, before other callbacks that read `logs`. It replaces the metrics in `logs` in
    place. It waits for all ranks.

    Attributes:
        weighted: See `__init__`.
        seen: The number of samples in this epoch's training; 0 until that ends.

    Raises, in fit() and on every rank:
        HvdliteError: Ranks have different metrics.
    """

    def __init__(self, device: str = "", weighted: bool = False) -> None:
        """
        Args:
            device: Accepted for Horovod's sake.
            weighted: Whether to weight each rank by its number of samples. The average is then the metric over all
                samples, also if ranks have different numbers of samples.
        """
        super().__init__()
        self.weighted = weighted
        self.seen = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.seen = 0.0

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self.seen = self.seen or self.samples()

    @calling("hvd.callbacks.MetricAverageCallback")
    def on_epoch_end(self, epoch: int, logs: MutableLogs | None = None) -> None:
        if logs is None or runtime.size() == 1:
            return
        trained, tested = self.seen or self.samples(), self.samples()
        mine = {name: (np.asarray(logs[name]), tested if name.startswith("val_") else trained) for name in sorted(logs)}
        everyones = allgather_object(mine)
        for rank, theirs in enumerate(everyones):
            if theirs.keys() != everyones[0].keys():
                raise HvdliteError(
                    f"MetricAverageCallback: rank {rank} has the metrics {', '.join(theirs)}, rank 0 has "
                    f"{', '.join(everyones[0])}. Compile every rank's model with the same metrics, and give fit() "
                    "validation data on every rank or on none [HVD318]"
                )
        for name in mine:
            values, weights = zip(*(theirs[name] for theirs in everyones), strict=True)
            mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=weights if self.weighted else None)
            logs[name] = mean if mean.ndim else float(mean)

    def samples(self) -> float:
        """Return the number of samples in the model's mean loss since Keras last reset it."""
        losses = [metric for metric in self.model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        return float(keras.ops.convert_to_numpy(losses[0].count)) if losses else 1.0
