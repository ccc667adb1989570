"""Renewal: the rules for attaching an optimizer again, the same for all frameworks.

After a restart `elastic.run` calls `renew` on everything that was attached under the last runtime (`Renewable`). Then
it calls the user's training function again, which may attach the optimizer once more. Without a restart, attaching an
optimizer a second time is an error (`require_replaceable`). After `hvd.shutdown()` or without the process set, an
attached optimizer cannot reduce gradients (`require_alive`).
"""

from __future__ import annotations

from typing import Protocol

from hvdlite.errors import RemovedError
from hvdlite.job import runtime
from hvdlite.job.groups import Group
from hvdlite.job.process_sets import ProcessSet


class Renewable(Protocol):
    """An attachment that can go on under another runtime: PyTorch's attachments, and `lists.Gradients`."""

    @property
    def name(self) -> str:
        """The name of rounds, the same on all ranks of the group."""
        ...

    @property
    def group(self) -> Group | None:
        """The ranks that reduce together; None where there is nothing to reduce."""
        ...

    @property
    def alive(self) -> bool:
        """Whether gradients can be reduced under the present runtime."""
        ...

    @property
    def renewed(self) -> bool:
        """Whether `renew` has made or continued this attachment."""
        ...

    def renew(self) -> None:
        """Go on under the present runtime. Collective over the group."""
        ...


def require_replaceable(attached: Renewable, shared: bool) -> None:
    """Raise RuntimeError unless another attachment to the same optimizer may take this one's place.

    After `renew`, the user's training function may attach the optimizer again.

    Args:
        attached: The optimizer's present attachment.
        shared: Whether this rank is one of the ranks that reduce together.
    """
    if shared and attached.alive and not attached.renewed:
        raise RuntimeError("this optimizer is attached already: call hvd.DistributedOptimizer once")


def require_alive(attached: Renewable) -> None:
    """Check that an attachment can reduce gradients.

    Raises:
        RemovedError: The process set has been removed.
        RuntimeError: `hvd.shutdown()` has been called since, and `hvd.init()` again.
        ForkedError: This process is a forked child of a rank.
    """
    if attached.group is not None and attached.group.removed:
        raise RemovedError(attached.group.ranks)
    runtime.require_attached(attached.alive, attached.group is not None)


def can_renew(process_set: ProcessSet) -> bool:
    """Whether an attachment to this process set can go on under another runtime: the set has not been removed."""
    return process_set.process_set_id is not None
