"""Horovod's callback that gives all ranks the same weights, and checks that they train together.

Keras calls it throughout `fit`. It broadcasts when training begins, if the model has weights then, and after the first
batch. `consistency_callback` has the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import keras
from keras import Model

from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import is_one_of, refuse_parts
from hvdlite.keras.common_variables import CommonVariables
from hvdlite.keras.consistency_callback import CALLER, ConsistencyCallback
from hvdlite.keras.functions import give
from hvdlite.keras.logs import Logs
from hvdlite.keras.strategy.steps import at_work
from hvdlite.keras.training_step import compile_now
from hvdlite.lanes.calls import calling
from hvdlite.ops.objects import allgather_object
from hvdlite.sharding.slots import slot_of


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Gives every rank the weights of `root_rank` in each fit(), and checks that all ranks train together.

    Give the callback to every rank. Each of its methods waits for all ranks. It broadcasts the weights when training
    begins. It broadcasts weights and the optimizer's state again after the first batch, when all variables exist and
    other callbacks have restored theirs. (With sharded=True each rank has its own part of the state, which is not
    broadcast.) It also runs the checks of `ConsistencyCallback`. On TensorFlow, XLA cannot exchange gradients: if Keras
    would compile the step with XLA, this callback has it compiled without.

    Attributes:
        root_rank: The global rank that sends its weights.
        variables: The model's variables that must be equal on all ranks.
        consistency: The checks.
        started: Whether the first batch of this fit() is over.
        given: Whether the ranks got weights before that batch.

    Raises, in fit() and on every rank:
        HvdliteError: Numbers of epochs or steps differ; a rank ends an epoch before others (TerminateOnNaN); a rank
            stops after an epoch and others do not (EarlyStopping); or trainable weights differ after an epoch. With
            the optimizer's replica_check="warn", different weights are a warning; with "off", they are ignored.
        RuntimeError: A step has changed weights without reducing gradients over the ranks.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: object = None) -> None:
        """
        Args:
            root_rank: The global rank that sends its weights.
            device: Accepted for Horovod's sake.
            local_variables: A variable, layer, list or dict of variables that keep this rank's values.

        Raises:
            ValueError: `root_rank` cannot be a rank, or `local_variables` has no variables.
        """
        super().__init__()
        if not hasattr(root_rank, "__index__") or root_rank < 0:
            raise ValueError(f"BroadcastGlobalVariablesCallback: root_rank={root_rank!r} is no rank, from 0 on")
        self.root_rank = root_rank
        self.variables = CommonVariables()
        self.consistency = ConsistencyCallback(self.variables)
        self.started = False
        self.given = False
        if local_variables is not None:
            self.register_local_var(local_variables)

    def register_local_var(self, var: object) -> None:
        """Keep this rank's values of a variable, or of several.

        Args:
            var: A variable, layer, list or dict of variables.

        Raises:
            ValueError: `var` has no variables.
        """
        self.variables.keep_own(var)

    def set_params(self, params: Mapping[str, int | None]) -> None:
        super().set_params(params)
        self.consistency.set_params(params)

    def set_model(self, model: Model) -> None:
        refuse_parts(model)
        super().set_model(model)
        self.consistency.set_model(model)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.started = False
        self.consistency.begin()
        self.given = self.all_have_weights()
        if self.given:
            self.broadcast(self.model.weights)
        self.consistency.reductions.note_weights()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        self.consistency.on_epoch_begin(epoch, logs)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.consistency.on_batch_end(batch, logs)
        if not self.started:
            state = [variable for optimizer in self.variables.optimizers() for variable in optimizer.variables]
            # With a strategy, ranks may have different weights after the first batch.
            together = [each for steps in at_work() for each in steps.variables] if self.given else []
            weights = [each for each in self.model.weights if not is_one_of(each, together)]
            self.broadcast([*weights, *(each for each in state if slot_of(each) is None)])
            self.started = True

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        self.consistency.on_epoch_end(epoch, logs)

    def on_train_end(self, logs: Logs | None = None) -> None:
        self.consistency.on_train_end(logs)

    @calling(CALLER)
    def all_have_weights(self) -> bool:
        """Return whether the ranks can broadcast weights before the first batch. Waits for all ranks."""
        weights = len(self.model.weights)  # a model that is not built may have layers that are
        everyones = allgather_object((self.model.built, weights))
        return all(built and number for built, number in everyones) or len({number for _, number in everyones}) == 1

    @calling(CALLER)
    def broadcast(self, variables: Iterable[Variable]) -> None:
        """Overwrite the variables that must be equal on all ranks with root_rank's values. Waits for all ranks."""
        changed = give(self.variables.among(variables), self.root_rank)
        if changed is not None and any(allgather_object(changed)):
            compile_now(self.model)
