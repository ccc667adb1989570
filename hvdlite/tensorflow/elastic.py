"""Horovod's `horovod.tensorflow.elastic`: states of TensorFlow variables and of Keras models. See `hvdlite.elastic`.

`run` also handles the errors of collectives inside graphs, which TensorFlow tells as its own. What tf.function has
traced goes on working after a restart: its nodes find the new communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.elastic import ObjectState, State, VariablesState, run
from hvdlite.keras.elastic import KerasState
from hvdlite.tensorflow.functions import broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

TensorFlowKerasState = KerasState


class TensorFlowState(VariablesState):
    """A list of tf.Variables, and attributes: `TensorFlowState(variables=[w, b], step=0)`.

    variables: with a TF1 session all global ones by default. session: the TF1 session that holds them, by default the
    one around the call; its graph must be the default graph. Raises ValueError where there are no variables to find.
    """

    def __init__(self, variables: Sequence[Any] | None = None, session: Any = None, **kwargs: Any) -> None:
        found = list(tf.compat.v1.global_variables() if variables is None else variables)
        if not found:
            raise ValueError("TensorFlowState: give it variables; in eager mode there is no list of all")
        self.session = session = session or tf.compat.v1.get_default_session()
        self.assignable = [SessionVariable(each, session) for each in found] if session else found
        super().__init__(lambda: self.assignable, lambda each: np.array(each.numpy()), self.give, **kwargs)

    def give(self, variables: list[Any]) -> None:
        """Give rank 0's values to all ranks."""
        if self.session is None:
            broadcast_variables(variables)
            return
        for each in variables:
            each.assign(self._bcast_object(each.numpy()))


class SessionVariable:
    """A TF1 variable in its session, used as one of eager mode. Adds its nodes to the graph once."""

    def __init__(self, variable: Any, session: Any) -> None:
        self.variable, self.session = variable, session
        self.value = tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
        self.operation = variable.assign(self.value)

    def numpy(self) -> Any:
        return self.session.run(self.variable)

    def assign(self, value: Any) -> None:
        self.session.run(self.operation, {self.value: value})
