"""The ranks with which an optimizer's gradients are reduced, and what they are called there."""

from __future__ import annotations

from hvdlite.job import runtime
from hvdlite.job.process_sets import ProcessSet
from hvdlite.lanes.calls import numbered
from hvdlite.lanes.lane import Lane


class Ranks:
    """The ranks of one attached optimizer. group: None where this rank is not among them. lane: there once opened."""

    lane: Lane

    def __init__(self, process_set: ProcessSet) -> None:
        self.runtime = runtime.current()
        self.group = self.runtime.groups.find(process_set)
        self.size = self.group.size if self.group else 1
        self.number = self.group.serial("optimizer") if self.group else 0
        """Optimizers are numbered in the order in which they were attached, alike on all ranks."""
        self.name = f"optimizer.{self.number}"

    @property
    def alone(self) -> bool:
        """Whether there is nobody to reduce gradients with."""
        return self.size == 1

    def open_lane(self, owner: object, title: str) -> None:
        """A lane of the optimizer's own, as long as the owner lives. title: the optimizer in messages. Collective."""
        assert self.group is not None
        self.lane = self.group.new_lane(self.name, owner, numbered(title, self.number))

    @property
    def are_all(self) -> bool:
        """Whether they are all ranks of the job."""
        return self.group is self.runtime.everyone

    @property
    def in_use(self) -> bool:
        """Whether hvdlite has not been shut down, and the process set has not been removed."""
        group = self.group
        return self.runtime.live and (group is None or group.eager.closed is None or not group.removed)
