"""How the rounds of one backward end, where it has gone through several attached optimizers: in the order in which they
were attached, since that of gradients may differ between ranks, which would wait for each other; and all or none.

For that reason no hook waits for anybody: where a round of an earlier backward has failed, or a new plan is needed, the
optimizer's round begins only when it is to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hvdlite.errors import MismatchError, VoidError

if TYPE_CHECKING:
    from hvdlite.torch.attach.attachment import Attachment


def end(attachment: Attachment, run: int) -> None:
    """The run in which this one's backward ends has ended: finish the rounds of all that end with it. Waits for all
    ranks. Raises VoidError on all ranks where a rank has begun anew."""
    ending = []
    for each in attachment.runtime.attachments:
        its = each is attachment
        if each.reducing and (its or each.backward.ends_with(run)):
            ending.append(each)
        elif not each.stepping and (its or not each.backward.under_way):  # else another thread uses it
            each.give_up()
    if len(ending) > 1 and any(each.void for each in ending):
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


def cancel(attachments: Sequence[Attachment]) -> None:
    """No rank is to have results of these rounds. All ranks do so, in this order; waits for them: in the next backward
    none is to find these under way, which others do not."""
    for each in attachments:
        each.taking = each.reducing = each.void = each.late = False
        each.reducer.void_round(each.tag, each.gradients.slots.preserve)
        each.gradients.let_go()
    for each in attachments:
        each.retries += each.reducer.forget_round()
