"""Outer optimizers: how DiLoCo moves the common weights by the ranks' average step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hvdlite.arrays import Array


class OuterOptimizer(Protocol):
    """An optimizer of common weights. Users may write their own, with a `repr` that is equal on all ranks."""

    @property
    def memories(self) -> int:
        """The number of arrays that the optimizer keeps for each weight, of the weight's shape."""
        ...

    def update(self, weight: Array, gradient: Array, memories: Sequence[Array]) -> None:
        """Change a weight in place.

        Args:
            weight: The common weight, in float32 or a wider dtype.
            gradient: The outer gradient: the common weight minus the ranks' average weight. It may be overwritten.
            memories: The arrays that the optimizer keeps for this weight, zeros at first; to be changed in place.
        """
        ...


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum as torch's, for DiLoCo's outer steps. Defaults as in Douillard et al. 2023, section 3.1.

    Args:
        lr: The learning rate. 1 without momentum makes DiLoCo average weights.
        momentum: The factor of the velocity in each outer step; 0: no momentum, and no memory for it.
        nesterov: Whether momentum is Nesterov's.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ValueError(
                f"hvd.OuterSGD: lr={self.lr!r} must be above 0, and momentum={self.momentum!r} at least 0 and below 1"
            )

    @property
    def memories(self) -> int:
        return int(self.momentum > 0)

    def update(self, weight: Array, gradient: Array, memories: Sequence[Array]) -> None:
        step = gradient
        for velocity in memories:
            velocity[...] = velocity * self.momentum + gradient
            step = gradient + velocity * self.momentum if self.nesterov else velocity
        weight[...] = weight - step * self.lr
