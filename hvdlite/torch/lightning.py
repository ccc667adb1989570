"""A callback that logs hvdlite's numbers with Lightning's loggers: `from hvdlite.torch.lightning import ...`.

It needs Lightning, which hvdlite does not install. `import hvdlite.torch` does not import this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import Callback

from hvdlite.api.summary import Summary, gathered, since_if_same_job

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

CALL = "hvdlite.torch.lightning.JobMetricsCallback"


class JobMetricsCallback(Callback):  # type: ignore[misc]
    """Logs the numbers of `hvd.metrics()` about each epoch with the Trainer's loggers: TensorBoard, W&B, MLflow, ...

    Give it to every rank's Trainer. It waits for all ranks at the end of each epoch.

    Attributes:
        before: The summary at the last epoch's end.
    """

    def __init__(self) -> None:
        self.before: Summary | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before = gathered(CALL, since=None)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        now = gathered(CALL, since=None)
        found = since_if_same_job(now, self.before).as_dict()
        self.before = now
        for logger in trainer.loggers:
            logger.log_metrics(found, step=trainer.global_step)
