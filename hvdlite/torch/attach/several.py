"""How the rounds of one backward() end if the backward() has gone through several attached optimizers.

hvdlite finishes the rounds in the order in which the optimizers were attached. If one round fails, those after it end
without results on all ranks. If a round is VOID from the beginning, all end without results. The order of the gradients
would not do: it may differ between ranks, which would then wait for each other for ever. For the same reason no hook
waits for another rank; see the states DEFERRED and VOID in `round`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from hvdlite.errors import MismatchError, VoidError
from hvdlite.gradients.reducer import why_void
from hvdlite.torch.attach.backward import Backward
from hvdlite.torch.attach.round import FINISHING, TO_FINISH, VOID, Round


class Member(Protocol):
    """An attachment that may take part in another attachment's backward()."""

    @property
    def round(self) -> Round: ...
    @property
    def backward(self) -> Backward: ...
    def finish_round(self) -> None: ...
    def give_up(self) -> None: ...
    def void_round(self) -> None: ...
    def forget_round(self) -> None: ...


def end(member: Member, everyone: Iterable[Member], run: int) -> None:
    """Finish the rounds of all attachments whose backward() ends with a run. Waits for all ranks.

    Args:
        member: The attachment that autograd has called.
        everyone: All attachments, in the order of attaching.
        run: The run that has ended.

    Raises:
        VoidError: The previous round of one of them has failed on some rank; on all ranks.
    """
    ending = []
    for each in everyone:
        its = each is member
        if each.round.state in TO_FINISH and (its or each.backward.ends_with(run)):
            ending.append(each)
        elif each.round.state is not FINISHING and (its or not each.backward.under_way):  # else another thread uses it
            each.give_up()
    if len(ending) > 1 and any(each.round.state is VOID for each in ending):
        cancel(ending)
        raise VoidError(why_void("this rank"))
    while ending:
        try:
            ending.pop(0).finish_round()
        except (VoidError, MismatchError):
            cancel(ending)
            raise


def cancel(members: Sequence[Member]) -> None:
    """End these rounds without results on any rank. Waits for all ranks, which call this for the same rounds.

    The next backward() then finds none of these rounds under way on one rank only.
    """
    for each in members:
        each.void_round()
    for each in members:
        each.forget_round()
