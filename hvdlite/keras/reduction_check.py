"""A check for training steps that reduce no gradients: each rank would train alone, and no operation would fail."""

from __future__ import annotations

from weakref import ref

from hvdlite.gradients.exchange import Exchange
from hvdlite.gradients.registry import registry
from hvdlite.job import runtime
from hvdlite.keras.attachment import attachment_of
from hvdlite.keras.backends import framework
from hvdlite.keras.common_variables import CommonVariables


class ReductionCheck:
    """Looks after each step whether weights have changed without a reduction, until one step has reduced gradients.

    Attributes:
        variables: The model's variables.
        passed: Whether a step has reduced gradients, or this rank need not reduce any.
        count: The reductions since training began.
        first: The exchange with which the first step began, among all ranks; None before a step has passed.
        before: Checksums of the weights before the first step; None while the model is not built.
    """

    def __init__(self, variables: CommonVariables) -> None:
        self.variables = variables
        self.passed = False
        self.count = registry.count_reductions()
        self.first: ref[object] | None = None
        self.before: dict[int, int] | None = None

    def begin(self) -> None:
        """Start over: training begins."""
        self.passed = runtime.size() == 1
        self.count = registry.count_reductions()
        self.first = None
        self.before = None

    def note_weights(self) -> None:
        """Keep checksums of the weights before the first step."""
        if not self.passed and self.variables.model.built:
            self.before = self.variables.checksums()

    def look(self) -> None:
        """Check the step that has ended.

        Raises:
            RuntimeError: The steps so far have changed weights, and have reduced no gradients.
        """
        if self.passed:
            return
        framework().wait()
        attachments = [each for each in map(attachment_of, self.variables.optimizers()) if each is not None]
        groups = [each.gradients.group for each in attachments]
        if self.count.number:
            self.passed = True
            self.first = self.count.first
        elif groups and all(group is None or group.size == 1 for group in groups):
            self.passed = True  # no attached optimizer has other ranks to reduce with
        elif any(each.strategy for each in attachments):
            self.passed = True  # the guards of the optimizer's methods see to it that its strategy is called
        elif self.before is None:
            self.before = self.variables.checksums()
        elif self.before != self.variables.checksums():
            raise RuntimeError(
                f"rank {runtime.rank()}: a training step has changed weights, and has reduced no gradients over the "
                "ranks: each rank trains alone. Compile the model with "
                "optimizer=hvd.DistributedOptimizer(optimizer), or use DistributedGradientTape of "
                "hvdlite.tensorflow [HVD312]"
            )

    def first_exchange(self) -> Exchange | None:
        """Return the exchange with which steps begin; None if there is none, or it no longer exists."""
        found = None if self.first is None else self.first()
        return found if isinstance(found, Exchange) else None
