"""Detects training steps that reduce no gradients: each rank would train alone, and no operation would fail."""

from __future__ import annotations

from weakref import ref

from hvdlite.gradients.exchange import Exchange
from hvdlite.gradients.registry import registry
from hvdlite.job import runtime
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.backends import framework
from hvdlite.keras.common_variables import CommonVariables


class ReductionCheck:
    """Looks after each step, until one has reduced gradients, whether weights change without a reduction.

    Attributes:
        variables: The model's.
        passed: Whether a step has reduced gradients, or none need be reduced.
        count: The reductions since training began.
        first: The exchange that the first step began with, among all ranks; None before a step has passed.
        before: Checksums of the weights before the first step; None while the model has none.
    """

    def __init__(self, variables: CommonVariables) -> None:
        self.variables = variables
        self.passed = False
        self.count = registry.count_reductions()
        self.first: ref[object] | None = None
        self.before: dict[int, int] | None = None

    def begin(self) -> None:
        """Training begins."""
        self.passed = runtime.size() == 1
        self.count = registry.count_reductions()
        self.first = None
        self.before = None

    def note_weights(self) -> None:
        """Remember the weights with which the steps begin."""
        if not self.passed and self.variables.model.built:
            self.before = self.variables.checksums()

    def look(self) -> None:
        """A step has ended.

        Raises:
            RuntimeError: The steps so far have changed weights, and have reduced no gradients.
        """
        if self.passed:
            return
        framework().wait()
        attachments = map(attachment_of, self.variables.optimizers())
        groups = [each.gradients.group for each in attachments if each is not None]
        if self.count.number:
            self.passed = True
            self.first = self.count.first
        elif groups and all(group is None or group.size == 1 for group in groups):
            self.passed = True  # of a process set that this rank is no member of, or alone in
        elif self.before is None:
            self.before = self.variables.checksums()
        elif self.before != self.variables.checksums():
            raise RuntimeError(
                "a training step has not reduced any gradients over the ranks: each rank trains alone. Compile the "
                "model with optimizer=hvd.DistributedOptimizer(optimizer), or use DistributedGradientTape of "
                "hvdlite.tensorflow."
            )

    def first_exchange(self) -> Exchange | None:
        """The exchange that steps begin with, if it still exists."""
        found = None if self.first is None else self.first()
        return found if isinstance(found, Exchange) else None
