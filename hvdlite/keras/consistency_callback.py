"""A callback that checks that all ranks train one model together. `BroadcastGlobalVariablesCallback` runs it."""

from __future__ import annotations

import keras
from keras import Model

from hvdlite.gradients.registry import registry
from hvdlite.gradients.tensors import Variable
from hvdlite.gradients.variables import is_one_of
from hvdlite.job import runtime
from hvdlite.keras.agreement import agree_on_length, go_on_together
from hvdlite.keras.backends import framework, settle
from hvdlite.keras.common_variables import CommonVariables
from hvdlite.keras.logs import Logs
from hvdlite.keras.reduction_check import ReductionCheck
from hvdlite.keras.training_step import with_attachment, without_xla
from hvdlite.keras.weight_comparison import WeightComparison
from hvdlite.lanes.calls import calling

CALLER = "hvd.callbacks.BroadcastGlobalVariablesCallback"
"""The name of the callback in messages: users do not know `ConsistencyCallback`."""


class ConsistencyCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Compares the ranks' progress and weights while fit() trains. Every method waits for all ranks.

    Attributes:
        variables: The model's variables that must be equal on all ranks.
        reductions: Detects steps that reduce no gradients.
        comparison: Compares weights after each epoch.

    Raises, in fit() and on every rank:
        HvdliteError: Numbers of epochs or steps differ; a rank ends an epoch before others (TerminateOnNaN); a rank
            stops after an epoch and others do not (EarlyStopping); or weights differ after an epoch (see
            `replica_check=`).
        RuntimeError: A step has changed weights, and has reduced no gradients.
    """

    def __init__(self, variables: CommonVariables) -> None:
        super().__init__()
        self.variables = variables
        self.reductions = ReductionCheck(variables)
        self.comparison = WeightComparison(variables)

    def set_model(self, model: Model) -> None:
        """Have the step compiled so that ranks can communicate in it."""
        super().set_model(model)
        self.variables.follow(model)
        if runtime.size() > 1:
            without_xla(model)
            with_attachment(model, self.variables.attachment)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        self.begin()
        self.reductions.note_weights()

    @calling(CALLER)
    def begin(self) -> None:
        """Agree on the length of the training that begins. Waits for all ranks."""
        settle()  # an earlier fit() may have left steps
        registry.comparers.append(self)
        self.reductions.begin()
        agree_on_length(self.params)

    @calling(CALLER)
    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        go_on_together(f"begins epoch {epoch + 1}")

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        self.reductions.look()

    @calling(CALLER)
    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        if runtime.size() == 1:
            return
        framework().wait()
        exchange = self.reductions.first_exchange()
        if exchange is not None:
            exchange.end_of(f"the end of epoch {epoch + 1}")
        self.comparison.compare(epoch)

    @calling(CALLER)
    def on_train_end(self, logs: Logs | None = None) -> None:
        registry.comparers.remove(self)
        go_on_together("stops")

    def cares_for(self, variable: Variable) -> bool:
        """Return whether the variable is one of the model's.

        Does not read `variables.model`: within a step, Keras on JAX has taken values out of variables, and that
        property would put them back.
        """
        given = self.variables.given
        return given is not None and is_one_of(variable, given.weights)
