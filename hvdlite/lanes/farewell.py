"""The state of a rank's leaving of a lane, on `hvd.shutdown()` or removal of a process set.

When all ranks leave, they compare the values that other modules have left here. `gradients.replica_check` leaves
digests of weights. The state also holds the error that later calls raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.lanes.request import Handle
from hvdlite.lanes.signature import digest
from hvdlite.lanes.workplace import Workplace

K = TypeVar("K")
V = TypeVar("V")
LAST_WORDS = "hvdlite has been shut down: call hvd.init() again first. [HVD108]"


class Farewell:
    """The state of one rank's leaving of one lane.

    Attributes:
        error: The error of calls after all ranks have left.
        gathers: A function that returns this rank's value, and one that gets all ranks'; None if nothing is gathered.
        brought: By name, values of this rank, and a function that gets all ranks' values if these differ.
        departure: The handle of the request to leave; None before this rank has called it.
        released: Whether the communicator has been released.
    """

    def __init__(self) -> None:
        self.error: HvdliteError = ShutdownError(LAST_WORDS)
        self.gathers: tuple[Callable[[], object], Callable[[Sequence[object]], None]] | None = None
        self.brought: dict[str, tuple[Mapping[Any, Any], Callable[[Sequence[Any]], None]]] = {}
        self.departure: Handle[None] | None = None
        self.released = False

    def begin(self, departure: Handle[None]) -> None:
        """This rank has called the request to leave."""
        self.departure = departure

    def end(self) -> None:
        """All ranks have left, and the communicator is released."""
        self.released = True

    def leave_with(self, error: HvdliteError) -> None:
        """Raise this error in calls after all have left."""
        self.error = error

    def gather(self, value: Callable[[], object], receive: Callable[[Sequence[object]], None]) -> None:
        """Gather a picklable value of each rank when all ranks leave. Every rank must ask for it.

        value: returns this rank's. receive: gets all ranks' values.
        """
        self.gathers = value, receive

    def bring(self, name: str, values: Mapping[K, V], report: Callable[[Sequence[Mapping[K, V]]], None]) -> None:
        """Compare these values when all ranks leave. report: gets all ranks' values, if they differ."""
        self.brought[name] = values, report

    def digest(self) -> int:
        """The digest of what this rank brings. It is equal on ranks that bring the same."""
        return digest(str([(name, sorted(values.items())) for name, (values, _) in sorted(self.brought.items())]))

    def part(self, at: Workplace) -> None:
        """The work of the request to leave: gather values, and report those that differ. Collective.

        A name that some rank does not bring is left out: that rank has deleted its optimizer, or ends with an error.
        """
        if self.gathers:
            value, receive = self.gathers
            receive(at.transport.allgather_object(value()))
        if at.transport.size == 1 or at.equal_counts:
            return
        everyone = at.transport.allgather_object({name: values for name, (values, _) in self.brought.items()})
        for name, (_, report) in self.brought.items():
            if all(name in theirs for theirs in everyone):
                report([theirs[name] for theirs in everyone])
