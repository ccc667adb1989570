"""How a small model's backward usually begins and ends, in few functions.

They run behind work that has emptied the caches, where to come to another one of Python's takes some 4 us, ten times
what it takes in a loop. So whether all is as usual is asked in one place; what is not goes its longer way through
`Attachment`, before anything has been changed here.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING

import torch

from hvdlite.lanes.signature import Round
from hvdlite.torch.attach import compiled as _compiled
from hvdlite.torch.attach import several
from hvdlite.torch.attach.backward import ROUND, current_run, outermost_node
from hvdlite.torch.attach.parameters import flat

if TYPE_CHECKING:
    from hvdlite.torch.attach.attachment import Attachment

made = tuple.__new__  # what Round(...) calls from a function of Python's


def heard(me: weakref.ref[Attachment], p: torch.Tensor) -> None:
    """A parameter's hook: autograd has accumulated into its gradient. Usually it is the first one of a backward, and to
    others the hook is deaf then. Waits for nobody."""
    attachment = me()
    if attachment is None:
        return
    backward, packing, run = attachment.backward, attachment.packing, current_run()
    if backward.run == run or not packing.unnoted:
        attachment.on_gradient(p)
        return
    compiled = sys.modules.get(_compiled.AUTOGRAD)
    with attachment.lock:
        usual = bool(  # among others: `alive`
            backward.latest is None and not attachment.paused and attachment.passes + 1 >= attachment.passes_per_step
            and attachment.runtime.live and not attachment.detached and attachment.lane.closed is None
            and attachment.reference() is not None and not attachment.reducer.begun
            and not packing.singly and not packing.fresh and not packing.slots.own and packing.parameters
            and _compiled.told and not getattr(compiled, "in_compiled_autograd_region", False)
            and outermost_node() is None
        )  # fmt: skip
        if usual:
            for each, alias in zip(packing.parameters, packing.slots.aliases, strict=True):
                grad = each.grad
                if grad is not None and grad is not alias and (each is not p or grad.is_inference() or grad._version):
                    usual = False  # a gradient that there was before, which somebody may have, too
                    break
            del each, alias, grad  # or we would be somebody
        if usual:
            attachment.taking = attachment.accumulating = attachment.void = attachment.late = False
            attachment.unreduced = attachment.reducing = True
            rounds = attachment.gradients.rounds
            attachment.tag = made(Round, (ROUND, (attachment.steps + 1, rounds + 1, attachment.retries + 1)))
            backward.begin(run, None, deaf=True)
    if not usual:
        attachment.on_gradient(p)


def ended(me: weakref.ref[Attachment]) -> None:
    """Autograd calls this when a backward has ended: finish its rounds. Waits for all ranks."""
    attachment = me()
    if attachment is None:
        return
    backward = attachment.backward
    backward.run = -1
    attachment.passes, attachment.accumulating = attachment.passes + attachment.accumulating, False
    try:
        if attachment.reducing and len(attachment.together) == 1:
            attachment.finish_round()
        else:
            several.end(attachment, current_run())
    finally:
        backward.forget()


def packed(attachment: Attachment) -> bool:
    """Bring all gradients to their views at once, where the plan fits (as `fits` would find) and all is as usual;
    otherwise nothing. No parameter may be frozen, for then ranks could differ in whether they find that it fits."""
    planned, packing, optimizer = attachment.planned, attachment.packing, attachment.reference()
    if optimizer is None or attachment.late or planned.frozen or not packing.unnoted:
        return False
    if attachment.streams:
        attachment.streams.join(attachment.pack)
    now = flat(optimizer.param_groups)
    if len(now) != len(planned.parameters) or attachment.gradients.sparse or attachment.given:
        now = attachment.trainable()
    return packing.pack_all(now, planned.addresses, attachment.reducer.mark_all)
