"""Horovod's callback that starts all ranks with the same weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import keras
from keras import Model

from hvdlite.gradients.tensors import Variable
from hvdlite.keras.common_variables import CommonVariables
from hvdlite.keras.consistency_callback import CALLER, ConsistencyCallback, Logs
from hvdlite.keras.functions import give
from hvdlite.keras.training_step import compile_now
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives every rank the weights of `root_rank` in each fit(), and makes sure that all ranks train together.

    The weights are given when training begins. Weights and the optimizer's state are given again after the first
    batch, when all of them exist and other callbacks have restored what they restore. The checks are those of
    `ConsistencyCallback`, which this one brings along. Where Keras would compile the step with XLA on TensorFlow,
    which cannot exchange gradients, it is compiled without.

    Attributes:
        root_rank: The rank that gives its weights.
        variables: The model's variables that are to be the same on all ranks.
        consistency: The checks.
        started: Whether the first batch of this fit() is over.

    Raises, in fit() and on every rank:
        HvdliteError: Numbers of epochs or steps differ; or a rank ends an epoch before others (TerminateOnNaN), or
            stops after one (EarlyStopping), so that others would wait for ever; or trainable weights differ after an
            epoch (with the optimizer's replica_check="warn" that is a warning, with "off" nothing).
        RuntimeError: A step has changed weights without reducing gradients over the ranks.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: object = None) -> None:
        """
        Args:
            root_rank: The rank that gives its weights.
            device: Accepted for Horovod's sake.
            local_variables: A variable or several that keep this rank's values.

        Raises:
            ValueError: `root_rank` is no rank in any job, or `local_variables` are no variables.
        """
        super().__init__()
        if not hasattr(root_rank, "__index__") or root_rank < 0:
            raise ValueError(f"BroadcastGlobalVariablesCallback: root_rank={root_rank!r} is no rank, from 0 on")
        self.root_rank = root_rank
        self.variables = CommonVariables()
        self.consistency = ConsistencyCallback(self.variables)
        self.started = False
        if local_variables is not None:
            self.register_local_var(local_variables)

    def register_local_var(self, var: object) -> None:
        """Keep this rank's own value of a variable, or of several.

        Raises:
            ValueError: `var` has no variables.
        """
        self.variables.keep_own(var)

    def set_params(self, params: Mapping[str, int | None]) -> None:
        super().set_params(params)
        self.consistency.set_params(params)

    def set_model(self, model: Model) -> None:
        super().set_model(model)
        self.consistency.set_model(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.started = False
        self.consistency.begin()
        if self.all_have_weights():
            self.broadcast(self.model.weights)
        self.consistency.reductions.note_weights()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.consistency.on_epoch_begin(epoch, logs)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.consistency.on_batch_end(batch, logs)
        if not self.started:
            state = [variable for optimizer in self.variables.optimizers() for variable in optimizer.variables]
            self.broadcast([*self.model.weights, *state])
            self.started = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.consistency.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.consistency.on_train_end(logs)

    @calling(CALLER)
    def all_have_weights(self) -> bool:
        """Whether the weights can be given before the first batch. Waits for all ranks."""
        weights = len(self.model.weights)  # of layers that have been built, also where the model says that it has not
        said = allgather_object((self.model.built, weights))
        return all(built and number for built, number in said) or len({number for _, number in said}) == 1

    @calling(CALLER)
    def broadcast(self, variables: Iterable[Variable]) -> None:
        """Give all ranks root_rank's values of the variables that are to be the same. Waits for all ranks."""
        changed = give(self.variables.among(variables), self.root_rank)
        if changed is not None and any(allgather_object(changed)):
            compile_now(self.model)
