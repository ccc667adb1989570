"""Horovod's callbacks for `model.fit`, on Keras 3 and every backend."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite import runtime
from hvdlite.errors import HvdliteError
from hvdlite.exchange import Exchange
from hvdlite.keras._attach import attachment_of
from hvdlite.keras._backends import border
from hvdlite.keras.functions import broadcast_variables
from hvdlite.keras.schedules import LearningRateScheduleCallback, LearningRateWarmupCallback
from hvdlite.objects import allgather_object
from hvdlite.variables import is_one_of, is_variable

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """When training begins, gives every rank root_rank's weights and optimizer state; after the first batch where the
    model has no weights before it.

    Also makes sure that ranks do train together: where Keras would compile the step with XLA, which cannot exchange
    gradients, it is compiled without; and where the first step has reduced no gradients over the ranks, it raises
    RuntimeError.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        """local_variables: a variable or several that keep this rank's values. device: for Horovod's sake."""
        super().__init__()
        self.root_rank, self.done, self.batches = root_rank, False, 0
        self.local: list[Any] = []
        several = [local_variables] if is_variable(local_variables) else local_variables
        for variable in several or ():
            self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Keep this variable's own value on each rank. Raises ValueError for what is no variable."""
        if not is_variable(var):
            raise ValueError(f"local_variables takes variables, not {type(var).__name__}")
        self.local.append(var)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        if runtime.size() > 1 and border().compiles_with_xla and getattr(model, "jit_compile", False):
            model.jit_compile = False
            model.train_function = None  # it may have been made before
            if runtime.rank() == 0:
                print("hvdlite: the training step is compiled without XLA, in which ranks cannot communicate")

    def on_train_begin(self, logs: Any = None) -> None:
        self.reductions, self.batches = Exchange.reductions, 0
        if not self.done and self.model.built:
            optimizer = self.model.optimizer
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self.broadcast()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.require_reduction()
        if not self.done:
            self.broadcast()

    def broadcast(self) -> None:
        model, self.done = self.model, True
        state = [] if model.optimizer is None else model.optimizer.variables
        common = [variable for variable in (*model.weights, *state) if not is_one_of(variable, self.local)]
        broadcast_variables(common, self.root_rank)

    def require_reduction(self) -> None:
        """Raise RuntimeError where the steps so far should have reduced gradients and have not."""
        attachment = attachment_of(self.model.optimizer) if self.model.optimizer is not None else None
        if runtime.size() == 1 or self.batches != (attachment.sums.passes if attachment else 1):
            return
        border().wait()
        if Exchange.reductions == self.reductions:
            raise RuntimeError(
                "the first training step has not reduced any gradients over the ranks: each rank trains alone. Compile "
                "the model with optimizer=hvd.DistributedOptimizer(optimizer), or use hvd.DistributedGradientTape."
            )


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """At the end of each epoch, averages all metrics in `logs` over the ranks: put it before callbacks that read them.

    All ranks must have the same metrics, else HvdliteError on every rank. weighted: by the number of samples that each
    rank has seen, which gives the metric over all samples where ranks have different numbers of them.
    """

    def __init__(self, device: str = "", weighted: bool = False) -> None:
        """device: for Horovod's sake."""
        super().__init__()
        self.weighted = weighted
        self.seen = 0.0  # samples in this epoch's training

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen = 0.0

    def on_test_begin(self, logs: Any = None) -> None:
        self.seen = self.seen or self.samples()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None or runtime.size() == 1:
            return
        trained, tested = self.seen or self.samples(), self.samples()
        mine = {name: (float(logs[name]), tested if name.startswith("val_") else trained) for name in sorted(logs)}
        said = allgather_object(mine)
        for rank, theirs in enumerate(said):
            if theirs.keys() != said[0].keys():
                raise HvdliteError(
                    f"MetricAverageCallback: rank {rank} has the metrics {', '.join(theirs)}, rank 0 has "
                    f"{', '.join(said[0])}. Every rank must have the same."
                )
        for name in mine:
            values, weights = zip(*(theirs[name] for theirs in said), strict=True)
            logs[name] = float(np.average(values, weights=weights if self.weighted else None))

    def samples(self) -> float:
        """How many samples the model's loss has been averaged over since it was last reset."""
        losses = [metric for metric in self.model.metrics if metric.name == "loss" and hasattr(metric, "count")]
        return float(losses[0].count) if losses else 1.0


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """A ModelCheckpoint that keeps the best model only. Its `filepath` may be set later, before training."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
        filepath: str | None = None,
    ) -> None:
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(filepath or f"unset{ending}", monitor, verbose, True, save_weights_only, mode, save_freq)
        self.filepath = filepath

    def on_train_begin(self, logs: Any = None) -> None:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint: set its filepath before training")
        super().on_train_begin(logs)
