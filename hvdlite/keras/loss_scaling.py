"""Mixed precision: hvdlite reduces gradients before Keras' LossScaleOptimizer looks whether they are finite.

LossScaleOptimizer skips a step with infinite gradients, and all ranks must skip the same steps. After the reduction an
infinity on one rank is an infinity on all. compile() makes the LossScaleOptimizer around the user's optimizer, after
the user has attached that optimizer. So hvdlite changes the class itself, for the whole process, while a job is live.
shutdown() restores the class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
from keras.optimizers import Optimizer

from hvdlite.gradients.tensors import Gradient, Tensor, Variable
from hvdlite.job import runtime
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.backends import framework


class ScalerMethods:
    """Replaces two methods of LossScaleOptimizer.

    Attributes:
        own: The class's own methods by name; empty before the first replacement.
    """

    def __init__(self) -> None:
        self.own: dict[str, Callable[..., object]] = {}

    def change(self) -> None:
        """Replace the class's methods. Safe to call twice."""
        scaler = keras.optimizers.LossScaleOptimizer
        for name, method in (("apply", scaled_apply), ("stateless_apply", scaled_stateless_apply)):
            self.own.setdefault(name, vars(scaler)[name])
            setattr(scaler, name, framework().untouched(method))

    def change_again(self, local_rank: int) -> None:
        """Replace the methods for another job: the end of the last one has restored the class."""
        self.change()

    def restore(self) -> None:
        """Restore the class's own methods. Safe to call twice."""
        for name, method in self.own.items():
            setattr(keras.optimizers.LossScaleOptimizer, name, method)


methods = ScalerMethods()
"""The replacement in this process, which has one LossScaleOptimizer class."""


def reduce_before_scaling() -> None:
    """Have LossScaleOptimizers reduce the gradients of attached inner optimizers, while a job is live."""
    if methods.restore not in runtime.when_stopped:
        runtime.when_stopped.append(methods.restore)
        runtime.when_started.append(methods.change_again)
    methods.change()


def scaled_apply(
    self: Optimizer, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None
) -> None:
    """Apply gradients in place of LossScaleOptimizer.apply; if the inner optimizer is attached, reduce them first."""
    attachment, go_on = attachment_of(self), methods.own["apply"].__get__(self)
    if attachment is None:
        go_on(grads, trainable_variables)
    else:
        attachment.reduce_and(go_on, self, grads, trainable_variables)


def scaled_stateless_apply(
    self: Optimizer,
    optimizer_variables: Sequence[Tensor],
    grads: Sequence[Gradient],
    trainable_variables: Sequence[Tensor],
) -> object:
    """Apply gradients in place of LossScaleOptimizer.stateless_apply, reduced if the inner optimizer is attached."""
    attachment, go_on = attachment_of(self), methods.own["stateless_apply"].__get__(self)
    results: list[object] = []

    def step(reduced: Sequence[Gradient], _: Sequence[Variable] | None) -> None:
        results.append(go_on(optimizer_variables, reduced, trainable_variables))

    if attachment is None:
        return go_on(optimizer_variables, grads, trainable_variables)
    with keras.StatelessScope(list(zip(self.variables, optimizer_variables, strict=True))) as scope:
        attachment.reduce_and(step, self, grads, None)
    # A pass before the last has no results: it only counts an iteration.
    return results[0] if results else (trainable_variables, [scope.get_current_value(v) for v in self.variables])
