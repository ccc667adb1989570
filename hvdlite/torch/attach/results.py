"""`Results`: counts the rounds that gave results, and refuses to reduce a result a second time.

An average may be reduced again: the average of equal gradients is the same average. A sum may not. With any other
operation than Average, hvdlite therefore remembers which gradients are results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvdlite.ops import Average
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.settings import TorchSettings
from hvdlite.torch.private_api import version


class Results:
    """The results of one optimizer's rounds, since the last step and altogether.

    Attributes:
        settings: The optimizer's settings.
        once: Whether a result must not be reduced again.
        given: The results that lie in no view, by id() of the parameter.
        applied: torch's versions of the gradients that step() has applied, by id() of the parameter; None once the user
            has been warned.
        versions: The versions of the last results, by id() of the parameter.
        zeroed: Whether the user has zeroed all of the last results in place, before any step() applied them.
        rounds: How many rounds have given results since the last step.
        done: How many rounds have given results altogether.
    """

    def __init__(self, settings: TorchSettings) -> None:
        self.settings = settings
        self.once = settings.terms.op is not Average
        self.given: dict[int, torch.Tensor | None] = {}
        self.applied: dict[int, int] | None = {}
        self.versions: dict[int, int] = {}
        self.zeroed = False
        self.rounds = 0
        self.done = 0

    def count(self) -> None:
        """One more round has given results."""
        self.rounds += 1
        self.done += 1

    def uncount(self, done: int) -> None:
        """Let no more than `done` rounds count, so that gradients set by hand are reduced again."""
        self.done = done

    def step_taken(self) -> None:
        """step() has applied the results."""
        self.rounds = 0

    def note_applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the gradients that step() has applied."""
        if self.applied is not None:
            grads = [(p, p.grad) for p in parameters]
            self.applied = {id(p): version(grad) for p, grad in grads if grad is not None}

    def start_over(self) -> None:
        """All ranks count from 0 again."""
        self.rounds = 0

    def note_given(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember p.grad of these parameters, and no others, as results that lie in no view."""
        self.given = {id(p): p.grad for p in parameters}

    def add_given(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember p.grad of these parameters as well."""
        self.given |= {id(p): p.grad for p in parameters}

    def note_versions(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember the versions of the results that these parameters have just got."""
        grads = [(p, p.grad) for p in parameters]
        self.versions = {id(p): version(grad) for p, grad in grads if grad is not None}
        self.zeroed = False

    @property
    def left_out_a_step(self) -> bool:
        """Whether no step() has applied the last results, as when a GradScaler skips a step."""
        return self.once and bool(self.rounds)

    def look_for_zeros(self, first: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        """Find out whether the user has zeroed all of the last results in place, before this backward().

        All gradients but the first one must be zeros now. The first one must have changed more than once since it was a
        result. (With a single parameter, hvdlite cannot distinguish this from a clipped gradient.)

        Args:
            first: The parameter whose gradient autograd has already added to.
            parameters: All parameters.
        """
        grads = [p.grad for p in parameters if p is not first and p.grad is not None]
        known, grad = self.versions.get(id(first)), first.grad
        changed = known is None or grad is None or version(grad) - known > 1
        self.zeroed = changed and bool(grads) and not any(map(has_values, grads))

    def refuse(self, p: torch.Tensor, in_view: bool = False) -> None:
        """Raise RuntimeError if p.grad is a result, to which backward() may have added, that must not be reduced again.

        Args:
            p: The parameter.
            in_view: Whether p.grad lies in the parameter's view.
        """
        if p.grad is None or not (in_view or p.grad is self.given.get(id(p))):
            return
        self.warn_of_applied(p, p.grad)
        if self.rounds and not self.zeroed:
            raise RuntimeError(
                f"a second backward() before step() with op={self.settings.terms.op.name} would reduce the first one's "
                "result again. Use optimizer.no_sync() or backward_passes_per_step, zero_grad() in between (with "
                "set_to_none=True), or op=Average. [HVD305]"
            )

    def refuse_all(self, parameters: Sequence[torch.Tensor]) -> None:
        """Do the same for each of these parameters."""
        for p in parameters:
            self.refuse(p)

    def warn_of_applied(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Warn, once, if a result that step() has applied is about to be reduced again.

        At most one change since then is a backward() that has added to it. More changes may include a zero_grad(). A
        gradient of zeros needs no warning.
        """
        if self.applied is None or version(grad) - self.applied.get(id(p), -2) not in (0, 1):
            return
        if grad.is_sparse or grad.any():
            self.applied = None
            name, op = self.settings.name(p), self.settings.terms.op.name
            warn(
                f"the gradient of {name} is reduced with op={op} a second time: step() has applied it, and nothing has "
                "zeroed it since. Call zero_grad() after each step() (p.grad.data.zero_() zeroes it too, but hvdlite "
                "cannot notice it)"
            )


def has_values(grad: torch.Tensor) -> bool:
    """Whether a gradient has an element other than zero."""
    values: torch.Tensor = grad.coalesce().values() if grad.is_sparse else grad
    return bool(values.any())
