"""Results that reductions have given an optimizer's parameters: how many, and that none is reduced again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hvdlite.ops import Average
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach.settings import Settings
from hvdlite.torch.private_api import version


class Results:
    """What reductions have given, since the last step and ever."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.once = settings.terms.op is not Average
        """Whether a result must not be reduced again. The average of equal gradients is the same average."""
        self.given: dict[int, torch.Tensor | None] = {}
        """Results that lie in no view, by id() of the parameter."""
        self.applied: dict[int, int] | None = {}
        """The version of what step() has applied, by id() of the parameter; None: the user has been warned."""
        self.versions: dict[int, int] = {}
        """The version of each result that was handed out last, by id() of the parameter."""
        self.zeroed = False
        """Whether no step() has applied the last results, and all of them have been zeroed in place."""
        self.rounds = 0
        """How often there were results since the last step."""
        self.done = 0
        """How often there were results at all."""

    def count(self) -> None:
        """There are results of one more round."""
        self.rounds += 1
        self.done += 1

    def uncount(self, done: int) -> None:
        """Gradients set by hand may be reduced again, though that was done: no more than `done` rounds count."""
        self.done = done

    def step_taken(self) -> None:
        """step() applies the results."""
        self.rounds = 0

    def note_applied(self, parameters: Iterable[torch.Tensor]) -> None:
        """Remember what step() applies."""
        if self.applied is not None:
            grads = [(p, p.grad) for p in parameters]
            self.applied = {id(p): version(grad) for p, grad in grads if grad is not None}

    def start_over(self) -> None:
        """All ranks count from 0."""
        self.rounds = 0

    def note_given(self, parameters: Iterable[torch.Tensor]) -> None:
        """What is in p.grad of these is a result, and lies in no view."""
        self.given = {id(p): p.grad for p in parameters}

    def add_given(self, parameters: Iterable[torch.Tensor]) -> None:
        """The same for these, too."""
        self.given |= {id(p): p.grad for p in parameters}

    def note_versions(self, parameters: Iterable[torch.Tensor]) -> None:
        """Results have been handed out: remember what they are."""
        grads = [(p, p.grad) for p in parameters]
        self.versions = {id(p): version(grad) for p, grad in grads if grad is not None}
        self.zeroed = False

    @property
    def left_out_a_step(self) -> bool:
        """Whether there are results that no step() has applied: a GradScaler leaves out steps."""
        return self.once and bool(self.rounds)

    def look_for_zeros(self, first: torch.Tensor, parameters: Iterable[torch.Tensor]) -> None:
        """A backward() has begun, and no step() has applied the results of the one before: find out whether all of them
        have been zeroed in place.

        first: the parameter whose gradient autograd has added to already. How often that gradient has changed tells,
        beside the zeros of all others. (A lone parameter cannot be told from one whose gradient was clipped.)
        """
        grads = [p.grad for p in parameters if p is not first and p.grad is not None]
        known, grad = self.versions.get(id(first)), first.grad
        changed = known is None or grad is None or version(grad) - known > 1
        self.zeroed = changed and bool(grads) and not any(map(has_values, grads))

    def refuse(self, p: torch.Tensor, in_view: bool = False) -> None:
        """Raise RuntimeError where p.grad is a result that backward has added to: to reduce it again would be wrong.

        in_view: p.grad lies in the parameter's view.
        """
        if p.grad is None or not (in_view or p.grad is self.given.get(id(p))):
            return
        self.warn_of_applied(p, p.grad)
        if self.rounds and not self.zeroed:
            raise RuntimeError(
                f"a second backward() before step() with op={self.settings.terms.op.name} would reduce the first one's "
                "result again. Use optimizer.no_sync() or backward_passes_per_step, zero_grad() in between (with "
                "set_to_none=True), or op=Average."
            )

    def refuse_all(self, parameters: Sequence[torch.Tensor]) -> None:
        """The same for each of these."""
        for p in parameters:
            self.refuse(p)

    def warn_of_applied(self, p: torch.Tensor, grad: torch.Tensor) -> None:
        """Warn once where a result that step() has applied is to be reduced again: at most one backward has changed it
        since, and no zero_grad(). Where zero_grad() has, and no backward, it is 0."""
        if self.applied is None or version(grad) - self.applied.get(id(p), -2) not in (0, 1):
            return
        if grad.is_sparse or grad.any():
            self.applied = None
            name, op = self.settings.names.get(id(p), "a parameter"), self.settings.terms.op.name
            warn(
                f"the gradient of {name} is reduced with op={op} a second time: step() has applied it, and nothing has "
                "zeroed it since. Call zero_grad() after each step() (p.grad.data.zero_() does as well, but cannot be "
                "told from nothing)"
            )


def has_values(grad: torch.Tensor) -> bool:
    """Whether a gradient is anything but zeros."""
    values: torch.Tensor = grad.coalesce().values() if grad.is_sparse else grad
    return bool(values.any())
