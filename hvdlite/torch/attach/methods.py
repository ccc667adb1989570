"""The methods that users call on an attached optimizer.

They are `synchronize`, `skip_synchronize`, `no_sync` and `set_backward_passes_per_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from hvdlite.gradients.terms import passes_of
from hvdlite.torch.attach import steps


def methods(
    attached: steps.Attached, optimizer_of: Callable[[], torch.optim.Optimizer]
) -> dict[str, Callable[..., object]]:
    """Return the methods by name. Each becomes an attribute of the optimizer.

    Args:
        attached: The optimizer's attachment.
        optimizer_of: Returns the optimizer, which its methods do not keep.
    """

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        """Accumulate gradients on this rank only, within a `with` block. Waits for nobody.

        The next backward() outside reduces the sum, or else the next step() does.
        """
        reducer = attached.reducer_of_gradients
        if reducer is not None:  # on all ranks, even if no backward() within the block reaches this optimizer
            reducer.steps.note_apart(not reducer.ranks.alone)
            if not reducer.results.once:
                reducer.round.expect_local()
        with (reducer or attached).round.pausing():
            yield

    def skip_synchronize() -> contextlib.AbstractContextManager[None]:
        """Have step() reduce nothing within a `with` block, after a call of `optimizer.synchronize()`."""
        return attached.steps.skipping_rounds()

    def synchronize() -> None:
        """Reduce the gradients that no backward() has reduced. Afterwards every p.grad is a result.

        Waits for all ranks.
        """
        steps.synchronize(attached)

    def set_backward_passes_per_step(passes: int) -> None:
        """Sum up gradients over a number of backward() calls, counted from now on, before they are reduced.

        Args:
            passes: The number, at least 1; the same on all ranks.

        Raises:
            ValueError: The number is below 1.
        """
        attached.round.set_passes_per_step(passes_of(passes))
        vars(optimizer_of())["backward_passes_per_step"] = attached.round.passes_per_step

    return {
        "synchronize": synchronize,
        "skip_synchronize": skip_synchronize,
        "no_sync": no_sync,
        "set_backward_passes_per_step": set_backward_passes_per_step,
    }
