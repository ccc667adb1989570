"""The observers of one job: the meter and the log of steps, the stall watch, and the timeline if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite.config import Config
from hvdlite.job import exits
from hvdlite.lanes.lane import Lane
from hvdlite.lanes.observer import Observer
from hvdlite.observers.meter import Meter, StepLog
from hvdlite.transports import Communicator
from hvdlite.transports.sent_bytes import SentBytes

if TYPE_CHECKING:
    from hvdlite.observers.stall import StallWatch


class Observers:
    """The observers of one job on this rank.

    Attributes:
        listening: The observers that lanes notify. All lanes have this list, which changes when a timeline begins.
        meter: Measures where this rank's time goes.
        steps: Divides that time into training steps.
        watch: The stall watch; None if there is none.
    """

    def __init__(self, sent: SentBytes, began: float) -> None:
        """
        Args:
            sent: Counts the bytes that this rank sends.
            began: When `hvd.init()` began, by `time.monotonic`.
        """
        self.meter = Meter(sent)
        self.steps = StepLog(self.meter, began)
        self.listening: list[Observer] = [self.meter]
        self.watch: StallWatch | None = None

    def start_watch(self, world: Communicator, lanes: Callable[[], list[Lane]], settings: Config) -> None:
        """Start the stall watch, unless the settings turn it off. Collective.

        Args:
            world: The communicator of all ranks.
            lanes: Returns the lanes that exist now.
            settings: The job's settings.
        """
        from hvdlite.observers import stall  # importing hvdlite alone needs no stall watch, which takes 8 ms

        self.watch = stall.watch(world, lanes, settings.stall, exits.give_up)

    def stop_watch(self) -> None:
        """Stop the stall watch, if there is one. Collective."""
        if self.watch:
            self.watch.stop()

    def trace(self, path: str | None, mark_cycles: bool, size: int) -> None:
        """Begin a timeline in this file, or end the present one (None).

        Args:
            path: The file.
            mark_cycles: Whether to mark where a lane turns to its next request.
            size: The number of ranks.
        """
        if path or len(self.listening) > 1:
            from hvdlite.observers import timeline

            timeline.switch(self.listening, path, mark_cycles, size)
