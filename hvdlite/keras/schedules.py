"""Callbacks that set learning rates for many ranks (Goyal et al. 2017: Accurate, Large Minibatch SGD)."""

from __future__ import annotations

from collections.abc import Callable

import keras

from hvdlite.job import runtime
from hvdlite.keras import private_api
from hvdlite.keras.attachment import innermost
from hvdlite.keras.logs import Logs, MutableLogs


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to initial_lr * multiplier(epoch), for start_epoch <= epoch < end_epoch.

    Give the callback to every rank, with the same arguments: it does not communicate. It adds the rate to `logs` as
    "lr" at the end of each epoch.

    Raises, in fit():
        ValueError: `steps_per_epoch` is needed, and neither the user nor Keras gives it.
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
        """
        Args:
            initial_lr: The learning rate to multiply.
            multiplier: A function of the epoch, or a number m, which stands for m ** (epoch - start_epoch).
            start_epoch: The epoch, from 0, at which this callback begins to set the rate.
            end_epoch: The epoch, from 0, at which this callback stops setting the rate. None: never.
            staircase: Whether to set the rate once per epoch. If not, it is set at each batch, and `multiplier` gets
                fractions of epochs.
            momentum_correction: Whether to scale the momentum of SGD and RMSprop by the same factor when the rate
                changes (Goyal et al., remark 2).
            steps_per_epoch: The number of batches in an epoch. None: Keras' own number.

        Raises:
            ValueError: `initial_lr` is None.
        """
        super().__init__()
        if initial_lr is None:
            raise ValueError(
                f"{type(self).__name__}: initial_lr=None must be the learning rate that the multiplier multiplies"
            )
        self.initial_lr = initial_lr
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            base = multiplier
            self.multiplier = lambda epoch: base ** (epoch - start_epoch)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    f"{type(self).__name__}: Keras does not know the length of an epoch: give it steps_per_epoch="
                )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.epoch = epoch

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:
        if self.epoch < self.start_epoch or (self.end_epoch is not None and self.epoch >= self.end_epoch):
            return
        if self.staircase:
            if batch == 0:
                self.set_rate(self.epoch)
        else:
            assert self.steps_per_epoch is not None
            self.set_rate(self.epoch + batch / self.steps_per_epoch)

    def set_rate(self, epoch: float) -> None:
        """Set the rate, and correct the momentum in place.

        Args:
            epoch: The epoch, from 0; may have a fraction.
        """
        optimizer = innermost(self.model.optimizer)
        before, now = self.rate(), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = now
        holds_rate = isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop)) and optimizer.momentum
        if self.momentum_correction and before and holds_rate and now != before:
            # Keras' momentum buffers contain the rate. To scale them once has the effect of a momentum coefficient
            # that is scaled for one step, and it also reaches compiled steps, which hold the coefficient.
            for buffer in private_api.momentum_buffers(optimizer):
                if buffer is not None:
                    buffer.assign(keras.ops.multiply(buffer, now / before))

    def rate(self) -> float:
        """Return the optimizer's present learning rate."""
        return float(keras.ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def on_epoch_end(self, epoch: int, logs: MutableLogs | None = None) -> None:
        if logs is not None:
            logs["lr"] = self.rate()


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from initial_lr / size, the rate of one rank, to initial_lr, by equal steps per batch.

    Give the callback to every rank, with the same arguments: it does not communicate.

    Raises, in fit():
        ValueError: Neither the user nor Keras gives `steps_per_epoch`.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        """
        Args:
            initial_lr: The learning rate at the end of the warmup.
            warmup_epochs: The length of the warmup in epochs; may have a fraction. 0: no warmup.
            momentum_correction: As for `LearningRateScheduleCallback`.
            steps_per_epoch: As for `LearningRateScheduleCallback`.
            verbose: 1 has rank 0 print a line at the end of the warmup.

        Raises:
            ValueError: `warmup_epochs` is less than 0, or `initial_lr` is None.
        """
        if warmup_epochs < 0:
            raise ValueError(f"LearningRateWarmupCallback: warmup_epochs={warmup_epochs!r} must be 0 or more")

        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = epoch + 1.0 / self.steps_per_epoch  # the last batch of the warmup gets exactly initial_lr
            size = runtime.size()
            return min(done / warmup_epochs, 1.0) * (size - 1) / size + 1 / size

        super().__init__(
            initial_lr, multiplier, end_epoch=warmup_epochs, staircase=False,  # type: ignore[arg-type]
            momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch,
        )  # fmt: skip
        self.verbose = verbose
        # Whether the rate may be below initial_lr. With steps_per_execution, callbacks see the first of several steps.
        self.warming = False

    def set_rate(self, epoch: float) -> None:
        self.warming = True
        super().set_rate(epoch)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        if self.warming and self.end_epoch is not None and epoch >= self.end_epoch:
            self.set_rate(self.end_epoch)
            self.warming = False

    def on_epoch_end(self, epoch: int, logs: MutableLogs | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        ended = self.end_epoch is not None and epoch < self.end_epoch <= epoch + 1
        if ended and self.verbose > 0 and runtime.rank() == 0:
            print(f"\nEpoch {epoch + 1}: the learning rate has reached {self.rate():g}")
