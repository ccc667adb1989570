"""What happens around an attached optimizer's step(): gradients that no backward has reduced are reduced before it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hvdlite import runtime
from hvdlite.errors import RemovedError
from hvdlite.torch import _sharing

if TYPE_CHECKING:
    from hvdlite.torch._attach import Attachment


def hooks(attachment: Attachment) -> list[Any]:
    """The handles of hooks that are called before and after each step."""
    optimizer = attachment.optimizer
    return [
        optimizer.register_step_pre_hook(partial(before, attachment)),
        optimizer.register_step_post_hook(partial(after, attachment)),
    ]


def before(
    attachment: Attachment, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Complete a round for gradients that no backward has reduced; a closure's backward will do its own."""
    reducers = _sharing.reducers(attachment)
    if not reducers:
        require_no_successor(attachment)
        return
    _sharing.refuse_other_terms(attachment, reducers)
    if not attachment.skipping and not has_closure(args, kwargs):
        complete(attachment, reducers)
    if not attachment.paused:
        attachment.steps += 1
    close(attachment, reducers)
    attachment.backward.forget()


def after(
    attachment: Attachment, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """What a closure's backward reduced was for this step."""
    if has_closure(args, kwargs):
        close(attachment, _sharing.reducers(attachment))


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether step() was called with one."""
    return any(map(callable, (*args, *kwargs.values())))


def synchronize(attachment: Attachment) -> None:
    """Complete the round under way, if gradients are still unreduced. Waits for all ranks."""
    complete(attachment, _sharing.reducers(attachment))


def complete(attachment: Attachment, reducers: Sequence[Attachment]) -> None:
    """`synchronize`, by those that reduce gradients of this optimizer's parameters."""
    for each in reducers:
        by_hand = each.gradients.done == attachment.seen.get(each.name, 0)
        if each.alive and not each.paused and (each.unreduced or by_hand or lacks_some(each)):
            done = each.gradients.done
            each.reduce()
            if each.shared and not each.gradients.once:  # an average may be averaged again: others that share it
                each.gradients.done = done  # may have set it by hand, too


def lacks_some(attachment: Attachment) -> bool:
    """Whether there are parameters that no plan has yet: a backward that reached only these has told nothing of it.
    Alike on all ranks. Raises RuntimeError where they have gradients, and others' may not be reduced again."""
    if not attachment.planned.may_lack_some(attachment.optimizer.param_groups):
        return False
    _sharing.leave_to_others(attachment)
    index, now = attachment.planned.index, attachment.trainable()
    lacking = {i: p for i, p in enumerate(now) if p.requires_grad and id(p) not in index}
    if not attachment.gradients.once:
        return bool(lacking)
    for i, p in lacking.items():
        if p.grad is not None:
            name = attachment.settings.names.get(id(p), f"parameter.{i}")
            raise RuntimeError(
                f"the gradient of {name} has not been reduced: a backward() reached only parameters that were added or "
                f"unfrozen after another one before this step, whose results op={attachment.settings.terms.op.name} "
                "cannot reduce again. Add or unfreeze them between step() and the first backward()"
            )
    return False


def close(attachment: Attachment, reducers: Sequence[Attachment]) -> None:
    """What has been reduced so far is applied."""
    if not attachment.paused:
        for each in reducers:
            attachment.seen[each.name], each.gradients.rounds = each.gradients.done, 0
            each.gradients.note_applied()
    attachment.unreduced = False


def require_no_successor(attachment: Attachment) -> None:
    """Raise where nobody reduces the gradients of an optimizer that is about to step, though there are others."""
    group = attachment.group
    if group is not None and group.removed:
        raise RemovedError(group.ranks)
    runtime.require_attached(attachment.alive, shared=group is not None and group.size > 1)
