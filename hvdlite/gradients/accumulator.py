"""Sums of the gradients of several passes, for frameworks whose optimizers keep none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from hvdlite.arrays import Array
from hvdlite.gradients.terms import passes_of


class Accumulator:
    """Sums of gradients over several passes, by the variables' indices, kept on this rank until they are reduced."""

    def __init__(self, passes: int, average: bool) -> None:
        self.passes, self.average, self.count = passes_of(passes), average, 0
        self.sums: dict[int, Array] = {}

    def add(self, gradients: Mapping[int, Array]) -> bool:
        """One pass more; whether it was the last before a step."""
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
        """The sums (or averages over the passes) of what had a gradient in any pass; they then start anew."""
        totals, self.sums = dict(sorted(self.sums.items())), {}
        if self.average:  # a quotient of 0-dimensional arrays is none
            return {i: np.asarray(total / total.dtype.type(self.passes)) for i, total in totals.items()}
        return totals

    def take_of(self, indices: Iterable[int]) -> list[Array]:
        """`take`, for a graph, in which it is fixed who has gradients. Raises ValueError where that was another in an
        earlier pass."""
        totals, wanted = self.take(), list(indices)
        if others := sorted(set(totals) ^ set(wanted)):
            raise ValueError(
                f"variables {others} (by their place in the list) had gradients in some passes of this step, in others "
                "None, which a graph cannot follow: give zeros (tf.zeros_like(variable)) instead of None"
            )
        return [totals[index] for index in wanted]
