"""Learning rates that follow the number of ranks (Goyal et al. 2017: large minibatches, warmed up)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.attachment import innermost


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Learning rate = initial_lr * multiplier(epoch), for start_epoch <= epoch < end_epoch.

    multiplier: a function of the epoch, or a number m for m ** (epoch - start_epoch). staircase: once per epoch, with
    whole epochs; else at every batch, with fractions of them. momentum_correction: when the rate changes, the
    momentum of SGD and RMSprop is scaled alike (Goyal et al., remark 2): what has been gathered counts at the new rate.
    steps_per_epoch: found out by itself where Keras knows it. Raises ValueError without initial_lr.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed: the learning rate that the multiplier multiplies")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch, self.epoch = steps_per_epoch, 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Any = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(f"{type(self).__name__}: the length of an epoch is unknown; give steps_per_epoch")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.epoch < self.start_epoch or (self.end_epoch is not None and self.epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self.set_rate(self.epoch)
        else:
            assert self.steps_per_epoch is not None
            self.set_rate(self.epoch + batch / self.steps_per_epoch)

    def set_rate(self, epoch: float) -> None:
        """Set the rate for this (fraction of an) epoch, and correct the momentum."""
        optimizer = innermost(self.model.optimizer)
        before, now = self.rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        holds_rate = isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)) and optimizer.momentum
        if self.momentum_correction and before and holds_rate and now != before:
            # Keras' momentum buffers hold the rate: scaling them once is what a scaled coefficient does in one step,
            # and reaches steps that have been compiled with the coefficient in them.
            for buffer in private_api.momentum_buffers(optimizer):
                if buffer is not None:
                    buffer.assign(keras.ops.multiply(buffer, now / before))

    def rate(self) -> float:
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is not None:
            logs["lr"] = self.rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """From the learning rate of one rank, initial_lr / size, to initial_lr, in equal steps per batch.

    warmup_epochs: how long; 0: not at all. verbose: whether rank 0 says when it is done. Raises ValueError for fewer.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if warmup_epochs < 0:
            raise ValueError(f"LearningRateWarmupCallback: warmup_epochs={warmup_epochs!r} must be 0 or more")

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = epoch + 1.0 / self.steps_per_epoch  # ends exactly at initial_lr
            size = runtime.size()
            return min(done / warmup_epochs, 1.0) * (size - 1) / size + 1 / size

        super().__init__(
            initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False,  # type: ignore[arg-type]
            momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        self.verbose = verbose
        self.warming = False  # so far; several steps in one execution are seen as the first of them

    def set_rate(self, epoch: float) -> None:
        self.warming = True
        super().set_rate(epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self.warming and self.end_epoch is not None and epoch >= self.end_epoch:
            self.set_rate(self.end_epoch)
            self.warming = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        ended = self.end_epoch is not None and epoch < self.end_epoch <= epoch + 1
        if ended and self.verbose > 0 and runtime.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate is warm: {self.rate():g}")
