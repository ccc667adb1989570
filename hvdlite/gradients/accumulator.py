"""The accumulator: adds up gradients of several passes, for Keras and TensorFlow optimizers.

With `backward_passes_per_step=n` a Keras or TensorFlow optimizer adds up n passes here, on its own rank. The sums of
the last pass then go to `lists.Gradients`. PyTorch needs no accumulator, since autograd adds to `p.grad`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from hvdlite.arrays import Array
from hvdlite.gradients.terms import passes_of


class Accumulator:
    """Sums of gradients over several passes, by the variables' indices.

    Attributes:
        passes: The passes per step.
        average: Whether `take` divides the sums by the number of passes.
        count: The passes so far.
        sums: The sums so far. A variable without a gradient has none.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self.passes, self.average, self.count = passes_of(passes), average, 0
        self.sums: dict[int, Array] = {}

    def add(self, gradients: Mapping[int, Array]) -> bool:
        """Add the gradients of one pass. Returns whether a step follows."""
        for index, gradient in gradients.items():
            if index in self.sums:
                self.sums[index] += gradient
            else:
                self.sums[index] = np.array(gradient)
        self.count += 1
        return self.count % self.passes == 0

    def clear(self) -> None:
        """Forget the passes since the last step."""
        self.count, self.sums = 0, {}

    def take(self) -> dict[int, Array]:
        """Return the sums, or the averages over the passes, and begin with new sums."""
        totals, self.sums = dict(sorted(self.sums.items())), {}
        if self.average:  # a quotient of 0-dimensional arrays is a scalar, not an array
            return {i: np.asarray(total / total.dtype.type(self.passes)) for i, total in totals.items()}
        return totals

    def take_of(self, indices: Iterable[int]) -> list[Array]:
        """`take` in a graph, where the variables with gradients are fixed.

        Args:
            indices: The variables that have gradients in the graph.

        Raises:
            ValueError: Other variables had gradients in an earlier pass.
        """
        totals, wanted = self.take(), list(indices)
        if others := sorted(set(totals) ^ set(wanted)):
            raise ValueError(
                f"variables {others} (by their place in the list) had gradients in some passes of this step and None "
                "in others, which a graph cannot follow: give zeros (tf.zeros_like(variable)) instead of None"
            )
        return [totals[index] for index in wanted]
