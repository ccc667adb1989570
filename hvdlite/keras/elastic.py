"""Horovod's `horovod.keras.elastic`, on every backend: a state of a model and its optimizer, and callbacks for fit().

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(data, initial_epoch=state.epoch, epochs=90, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state)])

With `initial_epoch=`, schedules continue after a restart; with Horovod's `epochs=90 - state.epoch`, they begin again at
epoch 0. Give CommitStateCallback last: earlier in the list, it would save the numbers of the previous batch or epoch,
and training would repeat the last one. Compiled steps keep working after a restart. See `hvdlite.elastic`.
"""

from __future__ import annotations

import keras
import numpy as np
from keras.optimizers import Optimizer

from hvdlite.arrays import Array
from hvdlite.elastic import ObjectState, State, VariablesState, run
from hvdlite.gradients.tensors import Tensor, Variable
from hvdlite.gradients.variables import variables_of
from hvdlite.keras import private_api
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.backends import settle
from hvdlite.keras.functions import broadcast_variables
from hvdlite.keras.logs import Logs
from hvdlite.sharding.slots import refuse_slots

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(VariablesState):
    """The state of a built model's weights, its optimizer's variables, and attributes.

    The attributes are given by name: `KerasState(model, epoch=0, batch=0)`. Each `commit` copies all values to the
    host; `restore` and `sync` assign to the variables in place.
    """

    def __init__(
        self, model: keras.Model, optimizer: Optimizer | None = None, backend: object = None, **kwargs: object
    ) -> None:
        """
        Args:
            model: A Keras model, built.
            optimizer: The optimizer; None: the model's own. If it has no variables yet, this builds it.
            backend: Accepted for Horovod's sake.
            **kwargs: The attributes and their values, which pickle must accept.

        Raises:
            ValueError: The model has not been built, or its optimizer has sharded=True: a lost rank's part of the state
                would be gone.
        """
        if not model.built:
            raise ValueError(
                f"{model.name} has no weights yet: build it (or call it once) before making its state [HVD316]"
            )
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        if self.optimizer is not None:
            refuse_slots("hvd.elastic.KerasState", self.optimizer.variables)
        super().__init__(self.variables, value_of, broadcast_variables, **kwargs)

    def restore(self) -> None:
        """Return to the last commit: assign the saved values to variables and attributes, in place."""
        settle()
        super().restore()
        if attached := self.optimizer and attachment_of(self.optimizer):
            attached.sums.clear()  # gradients of passes since the last step

    def variables(self) -> list[Variable]:
        """Return the model's weights, then the optimizer's variables."""
        own = [] if self.optimizer is None else list(self.optimizer.variables)
        return variables_of(private_api.up_to_date(self.model)) + own


def value_of(variable: Tensor) -> Array:
    """Return a copy of a variable's value, on the host."""
    return np.array(keras.ops.convert_to_numpy(variable))


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch.

    Give this callback after the callbacks that update the state. Each commit waits for all ranks.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        """
        Args:
            state: The state to commit.
            batches_per_commit: The number of batches between commits.
        """
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.left = batches_per_commit

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.left = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.commit()

    def commit(self) -> None:
        """Commit the state now. Waits for all ranks."""
        self.left = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.batch` to the number of the last batch in its epoch, from 0; and to 0 between epochs.

    To continue within an epoch, train the rest of that epoch by a fit() of its own:

        done = state.batch + 1 if state.batch else 0  # 0 may mean batch 0 or none: training repeats batch 0
        if done:
            model.fit(data.skip(done), initial_epoch=state.epoch, epochs=state.epoch + 1, callbacks=[
                UpdateBatchStateCallback(state, left_out=done), ...])
        model.fit(data, initial_epoch=state.epoch, epochs=90, callbacks=[UpdateBatchStateCallback(state), ...])
    """

    def __init__(self, state: ObjectState, left_out: int = 0) -> None:
        """
        Args:
            state: A state with an attribute `batch`, such as `KerasState(model, batch=0)`.
            left_out: The number of batches that are missing at the beginning of the first epoch's data.
        """
        super().__init__()
        self.state = state
        self.left_out = left_out
        self.before = 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.before = self.left_out

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.state.batch = self.before + batch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.state.batch = self.before = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets `state.epoch` to the number of epochs that are done, including those before a restart.

    This works with `fit(initial_epoch=state.epoch, epochs=90)` and with `fit(epochs=90 - state.epoch)`.
    """

    def __init__(self, state: ObjectState) -> None:
        """
        Args:
            state: A state with an attribute `epoch`, such as `KerasState(model, epoch=0)`.
        """
        super().__init__()
        self.state = state
        self.before: int | None = None  # state.epoch less the number of fit's first epoch; None before that epoch

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.before = None

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        if self.before is None:
            self.before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        assert self.before is not None
        self.state.epoch = self.before + epoch + 1
