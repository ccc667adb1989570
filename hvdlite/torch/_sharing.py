"""Parameters of several attached optimizers (a trunk with two heads, an optimizer made anew): one reduction serves all.

The newest reduces them, since of an earlier one nobody can tell, alike on all ranks, whether it is still in use.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite.torch._attach import Attachment


def overlapping(new: Attachment) -> list[Attachment]:
    """Earlier attachments, some of whose parameters are the new one's."""
    mine = new.members()
    return [other for other in new.runtime.attachments if not mine.isdisjoint(other.members())]


def refuse_other_terms(new: Attachment) -> None:
    """Raise ValueError where an optimizer that is in use reduces shared parameters' gradients in another way."""
    if unlike(new):
        gc.collect()  # some have been dropped
    for other in unlike(new):
        raise ValueError(
            f"parameters of this optimizer are also another's ({type(other.optimizer).__name__}), which reduces their "
            "gradients in another way: give both the same op=, backward_passes_per_step= and process_set="
        )


def unlike(new: Attachment) -> list[Attachment]:
    """Those that go on beside the new one, and reduce in another way."""
    mine = new.members()
    return [each for each in overlapping(new) if not each.members() <= mine and way(each) != way(new)]


def way(attachment: Attachment) -> tuple[Any, ...]:
    return attachment.settings.terms, attachment.passes_per_step, attachment.group


def take_over(new: Attachment) -> None:
    """Detach earlier optimizers whose parameters are all among the new one's; of others' take those that they share."""
    mine = new.members()
    for other in overlapping(new):
        if other.members() <= mine:
            other.detach()
            other.heir = new.optimizer
            other.step_hook = other.optimizer.register_step_pre_hook(other.before_step)
        else:
            other.give_away(other.members() & mine, new)
