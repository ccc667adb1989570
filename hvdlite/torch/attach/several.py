"""How the rounds of one backward() end, where it has gone through several attached optimizers.

They end in the order in which the optimizers were attached, and all or none. The order of gradients may differ between
ranks, which would wait for each other. For that reason no hook waits for anybody: see the states DEFERRED and VOID.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from hvdlite.errors import MismatchError, VoidError
from hvdlite.torch.attach.backward import Backward
from hvdlite.torch.attach.round import FINISHING, TO_FINISH, VOID, Round


class Member(Protocol):
    """An attachment whose round may end with others'."""

    @property
    def round(self) -> Round: ...
    @property
    def backward(self) -> Backward: ...
    def finish_round(self) -> None: ...
    def give_up(self) -> None: ...
    def void_round(self) -> None: ...
    def forget_round(self) -> None: ...


def end(member: Member, everyone: Iterable[Member], run: int) -> None:
    """The run in which one's backward() ends has ended: finish the rounds of all that end with it. Waits for all ranks.
    Raises VoidError on all ranks where a rank has begun anew."""
    ending = []
    for each in everyone:
        its = each is member
        if each.round.state in TO_FINISH and (its or each.backward.ends_with(run)):
            ending.append(each)
        elif each.round.state is not FINISHING and (its or not each.backward.under_way):  # else another thread uses it
            each.give_up()
    if len(ending) > 1 and any(each.round.state is VOID for each in ending):
        cancel(ending)
        raise VoidError(
            "a backward of this rank had raised after some of its gradients had left: no rank has results of this "
            "one. The next begins anew"
        )
    while ending:
        try:
            ending.pop(0).finish_round()
        except (VoidError, MismatchError):
            cancel(ending)
            raise


def cancel(members: Sequence[Member]) -> None:
    """No rank is to have results of these rounds. All ranks do so, in this order; waits for them: in the next
    backward() none is to find these rounds under way, which others do not."""
    for each in members:
        each.void_round()
    for each in members:
        each.forget_round()
