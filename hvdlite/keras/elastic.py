"""Horovod's `horovod.keras.elastic`, on every backend: the state of a model and its optimizer, and callbacks for fit.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(data, initial_epoch=state.epoch, epochs=90, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state)])

With initial_epoch schedules go on where they were; Horovod's `epochs=90 - state.epoch` begins them anew. The commit
comes last: earlier in the list, it would save numbers of the batch or epoch before, which would be done again. What fit
has compiled goes on working after a restart. See `hvdlite.elastic`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite.elastic import ObjectState, State, VariablesState, run
from hvdlite.gradients.variables import variables_of
from hvdlite.keras import private_api
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.backends import settle
from hvdlite.keras.functions import broadcast_variables

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
    """A built model's weights, its optimizer's variables, and attributes: `KerasState(model, epoch=0, batch=0)`.

    optimizer: the model's own by default. backend: accepted for Horovod's sake. Raises ValueError for a model that has
    no weights yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(f"{model.name} has no weights yet: build it (or call it once) before making its state")
        self.model = model
        self.optimizer = optimizer if optimizer is not None else getattr(model, "optimizer", None)
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(model.trainable_variables)
        super().__init__(self.variables, value_of, broadcast_variables, **kwargs)

    def restore(self) -> None:
        settle()
        super().restore()
        if attached := self.optimizer and attachment_of(self.optimizer):
            attached.sums.clear()  # of passes that belong to the step that is taken back

    def variables(self) -> list[Any]:
        """The model's weights, then the optimizer's variables."""
        own = [] if self.optimizer is None else list(self.optimizer.variables)
        return variables_of(private_api.up_to_date(self.model)) + own


def value_of(variable: Any) -> Any:
    return np.array(keras.ops.convert_to_numpy(variable))


class CommitStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state every `batches_per_commit` batches, and at the end of each epoch. Belongs behind the callbacks
    that update it."""

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit, self.left = state, batches_per_commit, batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        self.left = self.batches_per_commit

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        self.left = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.batch`: the number within its epoch, from 0, of the batch that was done last; 0 also between epochs.

    left_out: how many batches the data lack at fit's first epoch. To go on within one, fit the rest of it alone:

        done = state.batch + 1 if state.batch else 0  # an epoch's first batch is done again where none followed
        if done:
            model.fit(data.skip(done), initial_epoch=state.epoch, epochs=state.epoch + 1, callbacks=[
                UpdateBatchStateCallback(state, left_out=done), ...])
        model.fit(data, initial_epoch=state.epoch, epochs=90, callbacks=[UpdateBatchStateCallback(state), ...])
    """

    def __init__(self, state: Any, left_out: int = 0) -> None:
        super().__init__()
        self.state, self.left_out, self.before = state, left_out, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.before = self.left_out

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = self.before + batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self.before = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.epoch`: how many epochs are done, those before a restart included, whether fit is given
    `initial_epoch=state.epoch, epochs=90` or `epochs=90 - state.epoch`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.before: int | None = None  # how many more were done at fit's begin than the number of its first epoch

    def on_train_begin(self, logs: Any = None) -> None:
        self.before = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.before is None:
            self.before = self.state.epoch - epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        assert self.before is not None
        self.state.epoch = self.before + epoch + 1
