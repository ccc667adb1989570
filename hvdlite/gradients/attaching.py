"""Attaching: the rules for attaching an optimizer again, the same for all frameworks.

After a restart `elastic.run` renews all attachments. Then it calls the user's training function again, which may attach
the optimizer once more. Without a restart, attaching an optimizer a second time is an error (`require_replaceable`).
After `hvd.shutdown()`, or once its process set was removed, an attached optimizer cannot reduce gradients
(`require_alive`).
"""

from __future__ import annotations

from hvdlite.errors import RemovedError
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet


def require_replaceable(alive: bool, renewed: bool, process_set: ProcessSet) -> None:
    """Raise RuntimeError if an optimizer that reduces gradients on this rank would be attached a second time.

    Args:
        alive: Whether the present attachment reduces gradients.
        renewed: Whether `elastic.run` made it. The function that `elastic.run` calls again may attach another.
        process_set: The ranks of the present attachment.
    """
    if alive and not renewed and process_set.included():
        raise RuntimeError("this optimizer is attached already: call hvd.DistributedOptimizer once")


def require_alive(alive: bool, group: Group | None, shared: bool) -> None:
    """Raise if an optimizer is about to step and its gradients would not be reduced.

    Args:
        alive: Whether the attachment reduces gradients.
        group: The ranks that reduce together; None if this rank is not among them.
        shared: Whether there are other ranks to reduce with.

    Raises:
        RemovedError: The process set was removed.
        RuntimeError: The optimizer was attached before `hvd.shutdown()`.
        ForkedError: This process is a child of a rank.
    """
    if group is not None and group.removed:
        raise RemovedError(group.ranks)
    runtime.require_attached(alive, shared)


def can_renew(process_set: ProcessSet) -> bool:
    """Whether an attachment to this process set can go on under another runtime: the set has not been removed."""
    return process_set.process_set_id is not None
