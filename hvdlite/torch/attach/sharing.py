"""Several attached optimizers with the same parameters (one made anew): the newest reduces the gradients for all.

Of an earlier optimizer nobody can tell, alike on all ranks, whether it is still in use. So a later one takes over all
of its parameters. Optimizers that share only some are refused.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import torch

from hvdlite.torch.attach.settings import Settings


class Sharing:
    """Whether an optimizer is attached, and who reduces its gradients."""

    def __init__(self, renewed: bool) -> None:
        self.renewed = renewed
        """Attached by hvdlite in place of an earlier attachment: the user may attach it once more."""
        self.detached = False
        self.heir: torch.optim.Optimizer | None = None
        """The optimizer by whose attachment the gradients are reduced instead."""
        self.shared = False
        """This one has taken over from others, which may still step."""

    def take_over(self) -> None:
        """Gradients of others are reduced here, too."""
        self.shared = True

    def detach(self, heir: torch.optim.Optimizer | None) -> None:
        """Gradients are not reduced here any more."""
        self.detached, self.heir = True, heir


class Sharer(Protocol):
    """An attachment, as other attachments see it."""

    @property
    def alive(self) -> bool: ...
    @property
    def settings(self) -> Settings: ...
    @property
    def sharing(self) -> Sharing: ...
    @property
    def optimizer(self) -> torch.optim.Optimizer: ...
    @property
    def planned_ids(self) -> Collection[int]: ...
    @property
    def way(self) -> tuple[Any, ...]: ...
    def members(self) -> set[int]: ...
    def detach(self, heir: torch.optim.Optimizer | None = None) -> None: ...


SharerT = TypeVar("SharerT", bound=Sharer)


def refuse_some(new: Sharer, others: Callable[[], Iterable[Sharer]]) -> None:
    """Raise ValueError where an earlier optimizer has some, but not all, of its parameters in common with a new one.
    On all ranks, also where they are in another process set."""
    if sharing_some(new, others()):
        gc.collect()  # optimizers that were dropped are gone on all ranks then
    for other in sharing_some(new, others()):
        raise ValueError(in_common(new, other, other.members() & new.members()))


def sharing_some(new: Sharer, others: Iterable[Sharer]) -> list[Sharer]:
    """Earlier attachments in use that share some but not all of their parameters with a new one."""
    mine = new.members()
    alive = (each for each in others if each.alive and each.settings.process_set.process_set_id is not None)
    return [each for each in alive if not mine.isdisjoint(each.members()) and not each.members() <= mine]


def refuse_those_of_others(attachment: Sharer, mine: Collection[int], others: Iterable[Sharer]) -> None:
    """Raise ValueError where parameters that have come to an optimizer since it was attached are another's, too. mine:
    the parameters by id()."""
    for other in others:
        if other is not attachment and other.alive and (theirs := set(mine) & set(other.planned_ids)):
            raise ValueError(in_common(attachment, other, theirs))


def in_common(one: Sharer, other: Sharer, ids: Collection[int]) -> str:
    """Why two optimizers cannot be attached both, and what to do."""
    names: Mapping[int, str] = one.settings.names | other.settings.names
    first = names.get(next(iter(ids)), "without a name")
    sets = [each.settings.process_set.ranks for each in (one, other)]
    where = f", attached with process_set={sets[1]}, not {sets[0]}" if sets[0] != sets[1] else ""
    return (
        f"{len(ids)} parameters ({first}, ...) of this {type(one.optimizer).__name__} are also those of another "
        f"{type(other.optimizer).__name__}{where}, which has further ones. Attached optimizers share all of their "
        "parameters or none. Give all parameters to one optimizer, in groups (param_groups); if the other is not used "
        "any more, delete it first"
    )


def take_over(new: Sharer, others: Callable[[], Iterable[Sharer]]) -> None:
    """Detach earlier optimizers whose parameters are all among the new one's. The same on all ranks."""

    def found() -> list[Sharer]:
        mine = new.members()
        return [each for each in others() if each.alive and not mine.isdisjoint(each.members())]

    if found():
        gc.collect()  # optimizers that were dropped are gone on all ranks then
    for other in found():
        new.sharing.take_over()
        other.detach(heir=new.optimizer)


def reducer_of(attachment: SharerT) -> SharerT | None:
    """The attachment that reduces an optimizer's gradients: its own, unless another has taken its place. None where
    communication has begun anew."""
    found = attachment
    while not (alive := found.alive) and (heir := found.sharing.heir) is not None:
        found = heir.__dict__["_hvdlite"]
    if found is not attachment:
        attachment.sharing.detach(found.optimizer)  # those between are not kept any longer
    return found if alive else None


def refuse_other_way(attachment: Sharer, reducer: Sharer) -> None:
    """Raise ValueError where another optimizer reduces the gradients of one that is about to step, and not all of them,
    or in another way."""
    kind = type(attachment.optimizer).__name__
    if reducer.way != attachment.way:
        raise ValueError(
            f"parameters of this {kind} are also those of another optimizer, attached later, which reduces their "
            "gradients in another way: give both the same op=, backward_passes_per_step= and process_set="
        )
    if not attachment.members() <= reducer.members():
        raise ValueError(
            f"this {kind} has parameters that have come to it since another optimizer, attached later, reduces its "
            "gradients, and that one has not got them: add them to the other, too"
        )
