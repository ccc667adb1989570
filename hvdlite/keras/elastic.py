"""Horovod's `horovod.keras.elastic`, on every backend: the state of a model and its optimizer, and callbacks for fit.

    state = hvd.elastic.KerasState(model, batch=0, epoch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(data, epochs=90 - state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state)])

The commit comes last: earlier in the list, it would save numbers of the batch or epoch before, which would be done
again. What fit has compiled goes on working after a restart. See `hvdlite.elastic`.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from hvdlite.elastic import ObjectState, State, VariablesState, run
from hvdlite.keras.functions import broadcast_variables
from hvdlite.variables import variables_of

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

    def variables(self) -> list[Any]:
        """The model's weights, then the optimizer's variables."""
        if hasattr(self.model, "jax_state_sync"):  # within fit, JAX keeps their values elsewhere
            self.model.jax_state_sync()
        return variables_of(self.model) + ([] if self.optimizer is None else list(self.optimizer.variables))


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

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            self.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.commit()

    def commit(self) -> None:
        self.left = self.batches_per_commit
        self.state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.batch`: the number, from 0, of the batch that was done last, and 0 at the end of an epoch. To go on
    within an epoch, leave that many batches out of the data that fit is given, or one more so as not to repeat that
    one; its bar then counts those to come."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def on_train_begin(self, logs: Any = None) -> None:
        self.steps = self.params.get("steps")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self.steps:
            self.params["steps"] = self.steps - self.state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps `state.epoch`: how many epochs are done, those before a restart included."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state, self.before = state, 0

    def on_train_begin(self, logs: Any = None) -> None:
        self.before = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self.before + epoch + 1
