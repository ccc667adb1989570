"""Parameters of several attached optimizers (a trunk with two heads, an optimizer made anew): one reduction serves all.

The newest reduces them, since of an earlier one nobody can tell, alike on all ranks, whether it is still in use; those
that come to an optimizer later (`add_param_group`) are left to who has them.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdlite.torch.attach.attachment import Attachment


def overlapping(new: Attachment) -> list[Attachment]:
    """Earlier attachments, some of whose parameters are the new one's."""
    mine = new.members()
    return [other for other in new.runtime.attachments if other.alive and not mine.isdisjoint(other.members())]


def refuse_other_ranks(new: Attachment) -> None:
    """Raise ValueError where some, but not all, of an earlier optimizer's parameters would be reduced over other ranks
    than the rest of them. On all ranks, whether they are among those or not."""
    if among_other_ranks(new):
        gc.collect()  # those that were dropped are gone on all ranks then
    for other in among_other_ranks(new):
        names = new.settings.names | other.settings.names
        shared = [names.get(each, "without a name") for each in other.members() & new.members()]
        raise ValueError(
            f"{len(shared)} parameters ({shared[0]}, ...) are also those of another {type(other.optimizer).__name__}, "
            f"attached with process_set={other.settings.process_set.ranks}, not {new.settings.process_set.ranks}: one "
            "reduction serves all optimizers of a parameter. Give both the same process_set=, or leave these out of "
            "one; if the other is not used any more, delete it first"
        )


def among_other_ranks(new: Attachment) -> list[Attachment]:
    """Earlier attachments, in use, that share some but not all of their parameters and have another process set."""
    mine, process_set = new.members(), new.settings.process_set
    return [
        other for other in new.runtime.renewables
        if isinstance(other, type(new)) and other.alive and other.settings.process_set.process_set_id is not None
        and other.settings.process_set is not process_set and not mine.isdisjoint(other.members())
        and not other.members() <= mine
    ]  # fmt: skip


def take_over(new: Attachment) -> None:
    """Detach earlier optimizers whose parameters are all among the new one's; of others' take those that they share.
    Collective."""
    mine = new.members()
    if overlapping(new):
        gc.collect()  # those that were dropped are gone on all ranks then
    for other in overlapping(new):
        new.shared = True
        if other.members() <= mine:
            other.detach(heir=new.optimizer)
        else:
            give_away(other, other.members() & mine, new)
            # Now, while all ranks are here: before its next round one may have joined.
            other.make_plan(other.to_plan())
    for other in overlapping(new):  # only now: those before the new one, if they were dropped, may go with this
        keep(other)


def leave_to_others(attachment: Attachment) -> None:
    """Parameters that have come to an optimizer since it was attached may be others' already: they go on to reduce
    them. All ranks do so, before a plan."""
    mine = {id(p) for p in attachment.to_plan()}
    for other in attachment.runtime.attachments:
        theirs = mine & other.planned.index.keys() if other is not attachment and other.alive else None
        if theirs:
            other.shared = True
            give_away(attachment, theirs, other)
    keep(attachment)


def keep(attachment: Attachment) -> None:
    """Whoever reduces gradients of an optimizer's parameters lives as long as it does."""
    kept = dict.fromkeys(attachment.given.values())
    attachment.kept = [each.optimizer for each in kept if each.reference() is not None]


def give_away(attachment: Attachment, parameters: set[int], to: Attachment) -> None:
    """Reduce the gradients of these no more, by id(): one reduction serves both. `keep` is to follow."""
    attachment.given |= dict.fromkeys(parameters, to)
    for each in parameters:
        attachment.gradients.sparse.pop(each, None)
    attachment.renew_hooks()


def reducers(attachment: Attachment) -> list[Attachment]:
    """Those alive that reduce gradients of an optimizer's parameters: itself, unless another has taken its place, and
    others that share some, in the order in which they were attached; none where communication has begun anew."""
    while not (alive := attachment.alive) and attachment.heir is not None:
        attachment = attachment.heir.__dict__["_hvdlite"]
    if not alive:
        return []
    if not attachment.given:
        return [attachment]
    found = {each.number: each for each in (attachment, *attachment.given.values()) if each.alive}
    return [found[number] for number in sorted(found)]  # the same order on all ranks


def refuse_other_terms(attachment: Attachment, reducers: Sequence[Attachment]) -> None:
    """Raise ValueError where an optimizer that is about to step has parameters whose gradients another reduces in
    another way."""
    for other in reducers:
        if way(other) != way(attachment):
            raise ValueError(
                f"parameters of this {type(attachment.optimizer).__name__} are also those of another optimizer, "
                "attached later, which reduces their gradients in another way: give both the same op=, "
                "backward_passes_per_step= and process_set="
            )


def way(attachment: Attachment) -> tuple[Any, ...]:
    return attachment.settings.terms, attachment.passes_per_step, attachment.group
