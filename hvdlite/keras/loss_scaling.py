"""Mixed precision: gradients are reduced before Keras' LossScaleOptimizer looks whether they are finite.

It skips the step where they are not, and all ranks must skip alike. After the reduction an infinity on one rank is an
infinity on all. compile() makes the LossScaleOptimizer around the user's optimizer, after that was attached. So the
class itself is changed, for the whole process, while a job is live; shutdown() gives it its own methods back.
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
    """Two methods of LossScaleOptimizer, and ours in their place.

    Attributes:
        own: The class's own methods by name; empty before the first job that needs ours.
    """

    def __init__(self) -> None:
        self.own: dict[str, Callable[..., object]] = {}

    def change(self) -> None:
        """Put our methods in their place."""
        scaler = keras.optimizers.LossScaleOptimizer
        for name, method in (("apply", scaled_apply), ("stateless_apply", scaled_stateless_apply)):
            self.own.setdefault(name, vars(scaler)[name])
            setattr(scaler, name, framework().untouched(method))

    def change_again(self, local_rank: int) -> None:
        """A job begins: the last one has restored the class."""
        self.change()

    def restore(self) -> None:
        """Give the class its own methods back. Safe to call twice."""
        for name, method in self.own.items():
            setattr(keras.optimizers.LossScaleOptimizer, name, method)


methods = ScalerMethods()
"""Of this process, as the class that they belong to."""


def reduce_before_scaling() -> None:
    """From now on, while a job is live, LossScaleOptimizers know about attached inner optimizers."""
    if methods.restore not in runtime.when_stopped:
        runtime.when_stopped.append(methods.restore)
        runtime.when_started.append(methods.change_again)
    methods.change()


def scaled_apply(
    self: Optimizer, grads: Sequence[Gradient], trainable_variables: Sequence[Variable] | None = None
) -> None:
    """LossScaleOptimizer.apply, with reduced gradients when the inner optimizer is attached."""
    attachment, go_on = attachment_of(self), methods.own["apply"].__get__(self)
    if attachment is None:
        go_on(grads, trainable_variables)
    else:
        attachment.reduce_and(go_on, self, grads, trainable_variables)


def scaled_stateless_apply(
    self: Optimizer, optimizer_variables: Sequence[Tensor], grads: Sequence[Gradient],
    trainable_variables: Sequence[Tensor],
) -> object:
    """LossScaleOptimizer.stateless_apply, with reduced gradients when the inner optimizer is attached."""
    attachment, go_on = attachment_of(self), methods.own["stateless_apply"].__get__(self)
    results: list[object] = []

    def step(reduced: Sequence[Gradient], _: Sequence[Variable] | None) -> None:
        results.append(go_on(optimizer_variables, reduced, trainable_variables))

    if attachment is None:
        return go_on(optimizer_variables, grads, trainable_variables)
    with keras.StatelessScope(list(zip(self.variables, optimizer_variables, strict=True))) as scope:
        attachment.reduce_and(step, self, grads, None)
    # None at a pass before the last, which is an iteration and nothing else.
    return results[0] if results else (trainable_variables, [scope.get_current_value(v) for v in self.variables])
