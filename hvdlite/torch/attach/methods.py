"""What users call on an attached optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvdlite.gradients.terms import passes_of
from hvdlite.torch.attach import sharing, steps

if TYPE_CHECKING:
    from hvdlite.torch.attach.attachment import Attachment


def methods(attachment: Attachment) -> dict[str, Callable[..., Any]]:
    """By name; each becomes an attribute of the optimizer."""

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        """Backward passes inside only accumulate locally; the next one outside reduces the sum, or step() does."""
        reducers = sharing.reducers(attachment)
        for each in reducers:  # on all ranks, also where no backward inside reaches it
            each.unreduced |= not each.gradients.once
            each.apart = not each.alone  # its own gradients may move a rank's weights until it steps, as in SAM
        with with_true("paused", reducers or [attachment]):
            yield

    def skip_synchronize() -> contextlib.AbstractContextManager[None]:
        """step() inside does not synchronize: the user has, with optimizer.synchronize()."""
        return with_true("skipping", [attachment])

    def synchronize() -> None:
        """Average gradients that no backward() has averaged yet; then p.grad holds averages. Waits for all ranks."""
        steps.synchronize(attachment)

    def set_backward_passes_per_step(passes: int) -> None:
        """Sum gradients over that many backward() before they are averaged, from the next one on. Raises ValueError
        below 1."""
        attachment.passes_per_step, attachment.passes = passes_of(passes), 0
        vars(attachment.optimizer)["backward_passes_per_step"] = attachment.passes_per_step

    return {
        "synchronize": synchronize,
        "skip_synchronize": skip_synchronize,
        "no_sync": no_sync,
        "set_backward_passes_per_step": set_backward_passes_per_step,
    }


@contextlib.contextmanager
def with_true(flag: str, attachments: Sequence[Attachment]) -> Iterator[None]:
    before = [vars(each)[flag] for each in attachments]
    for each in attachments:
        setattr(each, flag, True)
    try:
        yield
    finally:
        for each, value in zip(attachments, before, strict=True):
            setattr(each, flag, value)
