"""A callback that adds hvdlite's numbers to Keras' metrics, so that loggers such as TensorBoard show them."""

from __future__ import annotations

from collections.abc import Sequence

import keras

from hvdlite.api.summary import Summary, gathered, since_if_same_job
from hvdlite.job import runtime
from hvdlite.keras.logs import Logs, MutableLogs

CALL = "hvd.callbacks.JobMetricsCallback"


class JobMetricsCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Adds numbers of `hvd.metrics()` about each epoch to `logs`: the history and other callbacks have them as well.

    Give the callback to every rank, before `keras.callbacks.TensorBoard` and others that read `logs`. It waits for all
    ranks at the end of each epoch. All ranks get the same numbers.

    Attributes:
        names: The names of the numbers.
        before: The summary at the last epoch's end.
    """

    def __init__(self, names: Sequence[str] = ("steps_per_s", "exposed_comm_pct", "waiting_pct")) -> None:
        """
        Args:
            names: The names of the numbers, without "hvdlite/".
        """
        super().__init__()
        self.names = tuple(names)
        self.before: Summary | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.before = gathered(CALL, since=None)
        found = self.before.as_dict()
        if unknown := [name for name in self.names if f"hvdlite/{name}" not in found]:
            known = ", ".join(name.removeprefix("hvdlite/") for name in found)
            raise ValueError(f"JobMetricsCallback: hvd.metrics() has no {unknown[0]!r}. It has {known}")

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        runtime.end_step(id(self))  # in a job of one rank no round of gradients ends a step

    def on_epoch_end(self, epoch: int, logs: MutableLogs | None = None) -> None:
        now = gathered(CALL, since=None)
        found = since_if_same_job(now, self.before).as_dict()
        self.before = now
        if logs is not None:
            logs.update({f"hvdlite/{name}": found[f"hvdlite/{name}"] for name in self.names})
