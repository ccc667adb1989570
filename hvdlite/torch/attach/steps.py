"""What happens around an attached optimizer's step(): gradients that no backward has reduced are reduced before it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial, wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.errors import RemovedError
from hvdlite.job import runtime
from hvdlite.system.user_warnings import warn
from hvdlite.torch.attach import sharing

if TYPE_CHECKING:
    from hvdlite.torch.attach.attachment import Attachment

AROUND_STEP = torch.optim.Optimizer.profile_hook_step(lambda: None).__code__.co_qualname
"""Of the function by which torch calls hooks around a step."""


def hooks(attachment: Attachment) -> list[Any]:
    """The handles of hooks that are called before and after each step."""
    optimizer = attachment.optimizer
    return [
        optimizer.register_step_pre_hook(partial(before, attachment)),
        optimizer.register_step_post_hook(partial(after, attachment)),
    ]


def before(
    attachment: Attachment, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Complete a round for gradients that no backward has reduced: now, or behind the closure, whose backward may do
    its own. Returns other arguments for the step where there is one."""
    if attachment.depth and nested(optimizer):
        attachment.depth += 1
        return None
    attachment.depth = 1
    reducers = sharing.reducers(attachment)
    if not reducers:
        require_no_successor(attachment)
        return None
    if reducers != [attachment]:
        sharing.refuse_other_terms(attachment, reducers)
    if not attachment.paused:
        attachment.steps += 1
        for each in reducers:
            if each.apart:
                each.apart = False
                each.alike.look()
    elif not attachment.alone:
        warn(
            "step() inside no_sync() moves this rank's weights by this rank's gradients alone: they come apart from "
            "the others'. Call it outside, where it reduces what has been accumulated", RuntimeWarning,
        )  # fmt: skip
    attachment.backward.forget()
    if (len(args) > 1 or kwargs) and has_closure(args, kwargs):
        wrap = partial(completing, attachment)
        return (args[0], *map(wrap, args[1:])), {name: wrap(value) for name, value in kwargs.items()}
    if not attachment.skipping:
        complete(attachment, reducers)
    close(attachment, reducers)
    return None


def nested(optimizer: torch.optim.Optimizer) -> bool:
    """Whether this step() is a part of another one of the same optimizer's, which a subclass extends: torch calls hooks
    around each."""
    frame, found = sys._getframe(1), 0
    while frame is not None:
        found += frame.f_code.co_qualname == AROUND_STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


def completing(attachment: Attachment, closure: Any) -> Any:
    """The closure, behind which gradients are reduced; anything else as it is."""
    if not is_closure(closure):
        return closure

    @wraps(closure)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = closure(*args, **kwargs)
        if not attachment.skipping:
            complete(attachment, sharing.reducers(attachment))
        return result

    return call


def after(
    attachment: Attachment, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """What was reduced behind a closure was for this step."""
    attachment.depth -= 1
    if (len(args) > 1 or kwargs) and has_closure(args, kwargs) and not nested(optimizer):
        close(attachment, sharing.reducers(attachment))


def has_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether step() was called with one. The first argument is the optimizer."""
    return any(map(is_closure, (*args[1:], *kwargs.values())))


def is_closure(given: Any) -> bool:
    """Whether what a step() was given computes a loss; a step of a user's own may want a module."""
    return callable(given) and not isinstance(given, torch.nn.Module)


def synchronize(attachment: Attachment) -> None:
    """Complete the round under way, if gradients are still unreduced: also by hand, since the last time. Waits for all
    ranks."""
    reducers = sharing.reducers(attachment)
    complete(attachment, reducers, attachment.synchronized)
    attachment.synchronized = {each.name: each.gradients.done for each in reducers if not each.gradients.once}


def complete(
    attachment: Attachment, reducers: Sequence[Attachment], synchronized: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Reduce what no backward has, by those that reduce gradients of this optimizer's parameters. synchronized: how
    many rounds each of them, by name, had completed when the user last called `synchronize`."""
    for each in reducers:
        by_hand = each.gradients.done in (attachment.seen.get(each.name, 0), synchronized.get(each.name))
        if not each.paused and (each.unreduced or by_hand or lacks_some(each)):
            done = each.gradients.done
            each.reduce()
            if each.shared and not each.gradients.once:  # an average may be averaged again: others that share it
                each.gradients.done = done  # may have set it by hand, too


def lacks_some(attachment: Attachment) -> bool:
    """Whether there are parameters that no plan has yet: a backward that reached only these has told nothing of it.
    Alike on all ranks. Raises RuntimeError where they have gradients, and others' may not be reduced again."""
    if not attachment.planned.may_lack_some(attachment.optimizer.param_groups):
        return False
    sharing.leave_to_others(attachment)
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
            if each.gradients.once:  # of averages nobody asks
                each.gradients.note_applied()
    attachment.unreduced = False
    attachment.backward.run = -1  # of a backward under way, gradients that come yet begin another round


def require_no_successor(attachment: Attachment) -> None:
    """Raise where nobody reduces the gradients of an optimizer that is about to step, though there are others."""
    group = attachment.group
    if group is not None and group.removed:
        raise RemovedError(group.ranks)
    runtime.require_attached(attachment.alive, shared=not attachment.alone)
