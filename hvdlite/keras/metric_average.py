"""Horovod's callback that averages metrics over the ranks."""

from __future__ import annotations

import keras
import numpy as np

from hvdlite.errors import HvdliteError
from hvdlite.job import runtime
from hvdlite.keras.consistency_callback import Logs
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics in `logs` over the ranks at the end of each epoch. Put it before callbacks that read them.

    Waits for all ranks. Raises HvdliteError on every rank, in fit(), when ranks have different metrics.

    Attributes:
        weighted: See `__init__`.
        seen: The samples in this epoch's training; 0 while it goes on.
    """

    def __init__(self, device: str = "", weighted: bool = False) -> None:
        """
        Args:
            device: Accepted for Horovod's sake.
            weighted: Whether ranks count by the number of samples that each has seen. That gives the metric over all
                samples when ranks have different numbers of them.
        """
        super().__init__()
        self.weighted = weighted
        self.seen = 0.0

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.seen = 0.0

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self.seen = self.seen or self.samples()

    @calling("hvd.callbacks.MetricAverageCallback")
    def on_epoch_end(self, epoch: int, logs: dict[str, object] | None = None) -> None:
        if logs is None or runtime.size() == 1:
            return
        trained, tested = self.seen or self.samples(), self.samples()
        mine = {name: (np.asarray(logs[name]), tested if name.startswith("val_") else trained) for name in sorted(logs)}
        said = allgather_object(mine)
        for rank, theirs in enumerate(said):
            if theirs.keys() != said[0].keys():
                raise HvdliteError(
                    f"MetricAverageCallback: rank {rank} has the metrics {', '.join(theirs)}, rank 0 has "
                    f"{', '.join(said[0])}. Every rank must have the same."
                )
        for name in mine:
            values, weights = zip(*(theirs[name] for theirs in said), strict=True)
            mean = np.average(np.stack(values).astype(np.float64), axis=0, weights=weights if self.weighted else None)
            logs[name] = mean if mean.ndim else float(mean)

    def samples(self) -> float:
        """How many samples the model's loss has been averaged over since it was last reset."""
        losses = [metric for metric in self.model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        return float(keras.ops.convert_to_numpy(losses[0].count)) if losses else 1.0
