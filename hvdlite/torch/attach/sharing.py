"""Several attached optimizers with the same parameters: the newest one reduces the gradients for all of them.

A script may make another optimizer for the same model. Ranks cannot agree on whether the earlier one is still in use.
The later optimizer therefore takes over all parameters of the earlier one. Optimizers that share only
some of their parameters are refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from typing import Protocol, TypeVar

import torch

from hvdlite.torch.attach.settings import TorchSettings


class Sharing:
    """Whether an optimizer is attached, and which optimizer reduces its gradients otherwise.

    Attributes:
        renewed: Whether `elastic.run` attached the optimizer again. The user may then attach it once more.
        detached: Whether the optimizer's own hooks are gone.
        heir: The optimizer that reduces the gradients instead; None if there is none.
        shared: Whether this optimizer has taken over from others, which may still step.
    """

    def __init__(self, renewed: bool) -> None:
        self.renewed = renewed
        self.detached = False
        self.heir: torch.optim.Optimizer | None = None
        self.shared = False

    def take_over(self) -> None:
        """This optimizer reduces the gradients of another one from now on."""
        self.shared = True

    def detach(self, heir: torch.optim.Optimizer | None) -> None:
        """This optimizer no longer reduces gradients."""
        self.detached, self.heir = True, heir


class Sharer(Protocol):
    """An attachment, as other attachments see it."""

    @property
    def alive(self) -> bool: ...
    @property
    def settings(self) -> TorchSettings: ...
    @property
    def sharing(self) -> Sharing: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def planned_ids(self) -> Collection[int]: ...
    @property
    def way(self) -> tuple[object, ...]: ...
    def members(self) -> set[int]: ...
    def detach(self, heir: torch.optim.Optimizer | None = None) -> None: ...


SharerT = TypeVar("SharerT", bound=Sharer)


def refuse_some(new: Sharer, others: Callable[[], Iterable[Sharer]]) -> None:
    """Refuse a new optimizer that shares some parameters with an earlier one, but not all of the earlier one's.

    All ranks raise the same error, even those outside the process set.

    Args:
        new: The attachment of the new optimizer.
        others: Returns the earlier attachments.

    Raises:
        ValueError: There is such an earlier optimizer.
    """
    if sharing_some(new, others()):
        gc.collect()  # so that all ranks have dropped the same optimizers
    for other in sharing_some(new, others()):
        raise ValueError(in_common(new, other, other.members() & new.members()))


def sharing_some(new: Sharer, others: Iterable[Sharer]) -> list[Sharer]:
    """Return the earlier attachments in use that share some but not all of their parameters with a new one."""
    mine = new.members()
    alive = (each for each in others if each.alive and each.settings.process_set.process_set_id is not None)
    return [each for each in alive if not mine.isdisjoint(each.members()) and not each.members() <= mine]


def refuse_those_of_others(attachment: Sharer, mine: Collection[int], others: Iterable[Sharer]) -> None:
    """Raise ValueError if an optimizer has got parameters, after it was attached, that belong to another one.

    Args:
        attachment: The optimizer's attachment.
        mine: The optimizer's parameters, by id().
        others: All attachments.
    """
    for other in others:
        if other is not attachment and other.alive and (theirs := set(mine) & set(other.planned_ids)):
            raise ValueError(in_common(attachment, other, theirs))


def in_common(one: Sharer, other: Sharer, ids: Collection[int]) -> str:
    """Return the text of an error: two optimizers share some parameters, and what to do about it."""
    names = {**one.settings.names, **other.settings.names}
    first = names.get(next(iter(ids)), "without a name")
    sets = [each.settings.process_set.ranks for each in (one, other)]
    where = f", attached with process_set={sets[1]}, not {sets[0]}" if sets[0] != sets[1] else ""
    return (
        f"{len(ids)} parameters ({first}, ...) of this {type(one.optimizer).__name__} are also those of another "
        f"{type(other.optimizer).__name__}{where}, which has further ones. Attached optimizers share all of their "
        "parameters or none. Give all parameters to one optimizer, in groups (param_groups). If you no longer use the "
        "other optimizer, delete it first [HVD309]"
    )


def take_over(new: Sharer, others: Callable[[], Iterable[Sharer]]) -> None:
    """Detach the earlier optimizers whose parameters all belong to the new one as well. The same on all ranks."""

    def found() -> list[Sharer]:
        mine = new.members()
        return [each for each in others() if each.alive and not mine.isdisjoint(each.members())]

    if found():
        gc.collect()  # so that all ranks have dropped the same optimizers
    for other in found():
        new.sharing.take_over()
        other.detach(heir=new.optimizer)


def reducer_of(attachment: SharerT) -> SharerT | None:
    """Return the attachment that reduces an optimizer's gradients: its own one, or the one that has taken over.

    None if the job has shut down or started again since.
    """
    found = attachment
    while not (alive := found.alive) and (heir := found.sharing.heir) is not None:
        found = heir.__dict__["_hvdlite"]
    if found is not attachment:
        attachment.sharing.detach(found.optimizer)  # so that the optimizers in between can be freed
    return found if alive else None


def refuse_other_way(attachment: Sharer, reducer: Sharer) -> None:
    """Refuse a step whose gradients another optimizer reduces in another way, or not all of them.

    Args:
        attachment: The attachment of the optimizer that is about to step.
        reducer: The attachment that reduces its gradients.

    Raises:
        ValueError: The two optimizers differ.
    """
    kind = type(attachment.optimizer).__name__
    if reducer.way != attachment.way:
        raise ValueError(
            f"parameters of this {kind} are also those of another optimizer, attached later, which reduces their "
            "gradients in another way: give both the same op=, backward_passes_per_step=, process_set= and "
            "sharded= [HVD309]"
        )
    if not attachment.members() <= reducer.members():
        raise ValueError(
            f"another optimizer, attached later, reduces the gradients of this {kind}, but lacks some of its "
            "parameters, which were added since: add them to the other optimizer, too [HVD309]"
        )
