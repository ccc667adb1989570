"""Compares the ranks' weights where a strategy says that they are equal, and the weights before training."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hvdlite.arrays import Array, is_host
from hvdlite.gradients.replica_check import Alike, Values, checksum
from hvdlite.gradients.variables import name_in_layer
from hvdlite.gradients.watched import CALLERS, CURES
from hvdlite.job import runtime
from hvdlite.lanes.lane import Lane


class SyncCheck:
    """Compares the ranks after updates that leave equal weights.

    The first comparison, after the first such update, is of the weights with which training began. Between these
    updates weights differ by design, so there is no other comparison, and none when the job ends.

    Attributes:
        alike: The comparison.
        names: The variables' names in messages.
        first: Checksums of the weights with which training began; None if they are not known.
        now: Checksums of the present weights; None if they lie on a GPU.
    """

    def __init__(self, mode: str) -> None:
        """mode: one of `config.REPLICA_CHECKS`."""
        self.alike = Alike(lambda begins: self.first if begins else self.now, CURES, CALLERS["optimizer"], mode)
        self.names: list[str] = []
        self.first: Values | None = None
        self.now: Values | None = None

    def begin(self, lane: Lane, name: str, names: Sequence[str], weights: Sequence[Array] | None) -> None:
        """Training begins with these weights.

        Args:
            lane: The lane of the ranks.
            name: The name of the comparisons on it.
            names: The variables' names.
            weights: The weights; None if they come from one rank or one file, so that they need no comparison.
        """
        self.names = [f"{name_in_layer(each)} (variable {number})" for number, each in enumerate(names)]
        self.alike.enter(lane, name)
        runtime.current().registries.forget(self.alike)
        self.alike.expect("0")
        self.first = None if weights is None else self.checksums(weights)

    def synchronized(self, weights: Sequence[Array]) -> None:
        """These weights should be equal on all ranks. Collective if it is time to compare.

        Raises:
            MismatchError: The weights with which training began differ. Every rank raises it.
        """
        self.now = self.checksums(weights) if self.alike.schedule.rounds + 1 >= self.alike.schedule.next else None
        self.alike.look()

    def checksums(self, weights: Sequence[Array]) -> Values | None:
        """Checksums by name; None if a weight lies on a GPU."""
        if not all(map(is_host, weights)):
            return None
        return {("weights", name): checksum(array) for name, array in zip(self.names, weights, strict=True)}

    def forget(self) -> None:
        """Weights have been changed from outside: those with which training began do not matter."""
        self.first = None

    def expect(self, root: str = "0", fatal: Collection[str] = ("weights",)) -> None:
        """A checkpoint was loaded: training begins with the next round."""
        self.forget()
        self.alike.expect(root, fatal)

    def prepare_last_look(self) -> None:
        """Do nothing: ranks may end with different weights."""
