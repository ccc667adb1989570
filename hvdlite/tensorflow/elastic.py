"""Horovod's `horovod.tensorflow.elastic`: states of TensorFlow variables and of Keras models. See `hvdlite.elastic`.

`run` also handles errors of collectives in graphs, which TensorFlow reports as its own errors. A tf.function that was
traced before a restart works after it: its nodes find the new communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import tensorflow as tf

from hvdlite.elastic import ObjectState, State, VariablesState, run
from hvdlite.keras.elastic import KerasState
from hvdlite.tensorflow.functions import broadcast_variables

__all__ = ["ObjectState", "State", "TensorFlowKerasState", "TensorFlowState", "run"]

TensorFlowKerasState = KerasState


class Assignable(Protocol):
    """A variable with a value that the state can read and set."""

    def numpy(self) -> object:
        """Return the value as an array."""
        ...

    def assign(self, value: object) -> object:
        """Give the variable another value."""
        ...


class TensorFlowState(VariablesState):
    """An elastic state of TensorFlow variables and attributes: `TensorFlowState(variables=[w, b], step=0)`.

    Attributes:
        session: The TF1 session that holds the variables; None in eager mode.
        assignable: The variables; in a session a `SessionVariable` for each.
    """

    def __init__(
        self,
        variables: Sequence[tf.Variable] | None = None,
        session: tf.compat.v1.Session | None = None,
        **kwargs: object,
    ) -> None:
        """Make a state, and save the variables' present values.

        Args:
            variables: The variables. None: all global variables of the TF1 graph.
            session: The TF1 session that holds the variables. Its graph must be the default graph. None: the session
                whose `with` block surrounds the call, if there is one.
            **kwargs: Other attributes of the state, such as step=0.

        Raises:
            ValueError: There are no variables.
        """
        found = list(tf.compat.v1.global_variables() if variables is None else variables)
        if not found:
            raise ValueError(
                "TensorFlowState has no variables: give it variables=[...]. In eager mode TensorFlow keeps no list of "
                "all variables"
            )
        self.session = session = session or tf.compat.v1.get_default_session()
        self.assignable: list[Assignable] = [SessionVariable(each, session) for each in found] if session else found
        super().__init__(lambda: self.assignable, lambda each: np.array(each.numpy()), self.give, **kwargs)

    def give(self, variables: list[Assignable]) -> None:
        """Overwrite the variables with rank 0's, in place. Waits for all ranks.

        Args:
            variables: The variables; in a session `SessionVariable`s.
        """
        if self.session is None:
            broadcast_variables(variables)
            return
        for each in variables:
            each.assign(self._bcast_object(each.numpy()))


class SessionVariable:
    """A TF1 variable in its session, with the methods of an eager variable.

    Attributes:
        variable: The variable.
        session: The session that holds the variable's value.
        value: A placeholder for a new value.
        operation: Assigns the placeholder's value.
    """

    def __init__(self, variable: tf.Variable, session: tf.compat.v1.Session) -> None:
        """Add the nodes of an assignment to the graph."""
        self.variable, self.session = variable, session
        self.value = tf.compat.v1.placeholder(variable.dtype.base_dtype, variable.shape)
        self.operation = variable.assign(self.value)

    def numpy(self) -> object:
        """Return the variable's value as an array."""
        return self.session.run(self.variable)

    def assign(self, value: object) -> None:
        """Give the variable another value."""
        self.session.run(self.operation, {self.value: value})
