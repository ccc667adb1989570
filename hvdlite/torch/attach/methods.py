"""What users call on an attached optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdlite.gradients.terms import passes_of
from hvdlite.torch.attach import steps


def methods(
    attached: steps.Attached, optimizer_of: Callable[[], torch.optim.Optimizer]
) -> dict[str, Callable[..., Any]]:
    """By name; each becomes an attribute of the optimizer."""

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        """Backward passes inside only accumulate locally; the next one outside reduces the sum, or step() does."""
        reducer = attached.reducer_of_gradients
        if reducer is not None:  # on all ranks, also where no backward inside reaches it
            reducer.steps.come_apart(not reducer.ranks.alone)
            if not reducer.results.once:
                reducer.round.expect_local()
        with (reducer or attached).round.pausing():
            yield

    def skip_synchronize() -> contextlib.AbstractContextManager[None]:
        """step() inside does not synchronize: the user has, with optimizer.synchronize()."""
        return attached.steps.skipping_rounds()

    def synchronize() -> None:
        """Average gradients that no backward() has averaged yet; then p.grad holds averages. Waits for all ranks."""
        steps.synchronize(attached)

    def set_backward_passes_per_step(passes: int) -> None:
        """Sum gradients over that many backward() before they are averaged, from the next one on. Raises ValueError
        below 1."""
        attached.round.set_passes_per_step(passes_of(passes))
        vars(optimizer_of())["backward_passes_per_step"] = attached.round.passes_per_step

    return {
        "synchronize": synchronize,
        "skip_synchronize": skip_synchronize,
        "no_sync": no_sync,
        "set_backward_passes_per_step": set_backward_passes_per_step,
    }
