"""The ranks that reduce one optimizer's gradients together, and the optimizer's name among them."""

from __future__ import annotations

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.calls import numbered
from hvdlite.lanes.lane import Lane


class Ranks:
    """The ranks of one attached optimizer, under the runtime that it was attached under.

    Attributes:
        runtime: The runtime.
        group: The ranks; None if this rank is not among them.
        size: The number of ranks; 1 if this rank is not among them.
        number: The optimizer's number. Optimizers are counted in the order of attaching, the same on all ranks.
        name: The name of the optimizer's rounds: 'optimizer.0', say.
        lane: The optimizer's lane, once it is open.
    """

    lane: Lane

    def __init__(self, process_set: ProcessSet) -> None:
        self.runtime = runtime.current()
        self.group = self.runtime.groups.find(process_set)
        self.size = self.group.size if self.group else 1
        self.number = self.group.serial("optimizer") if self.group else 0
        self.name = f"optimizer.{self.number}"

    @property
    def alone(self) -> bool:
        """Whether there is no other rank to reduce gradients with."""
        return self.size == 1

    def open_lane(self, owner: object, title: str) -> None:
        """Open a lane for this optimizer. Collective.

        Args:
            owner: The lane lives as long as this object.
            title: The optimizer's name in messages.
        """
        assert self.group is not None
        self.lane = self.group.new_lane(self.name, owner, numbered(title, self.number))

    @property
    def are_all(self) -> bool:
        """Whether these are all ranks of the job."""
        return self.group is self.runtime.everyone

    @property
    def in_use(self) -> bool:
        """Whether the runtime is the present one, and the process set has not been removed."""
        group = self.group
        return self.runtime.live and (group is None or group.eager.closed is None or not group.removed)
