"""The end of a lane: what a rank brings when all ranks leave, and what later calls get to hear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvdlite.errors import HvdliteError, ShutdownError
from hvdlite.lanes.request import Handle
from hvdlite.lanes.signature import digest
from hvdlite.lanes.workplace import Workplace

LAST_WORDS = "hvdlite has been shut down: call hvd.init() again first."


class Farewell:
    """How one rank leaves one lane.

    Attributes:
        error: The error of calls after all have left.
        brought: By name, the values that this rank brings, and who gets all ranks' values where these differ.
        departure: The handle of the request to leave, once this rank has called it.
        released: Whether the communicator has been released.
    """

    def __init__(self) -> None:
        self.error: HvdliteError = ShutdownError(LAST_WORDS)
        self.brought: dict[str, tuple[Mapping[Any, Any], Callable[[Sequence[Any]], None]]] = {}
        self.departure: Handle[None] | None = None
        self.released = False

    def bring(self, name: str, values: Mapping[Any, Any], tell: Callable[[Sequence[Any]], None]) -> None:
        """Compare these values when all ranks leave. tell: gets all ranks' values, if they differ."""
        self.brought[name] = values, tell

    def digest(self) -> int:
        """A number that is equal on all ranks which bring the same."""
        return digest(str([(name, sorted(values.items())) for name, (values, _) in sorted(self.brought.items())]))

    def part(self, at: Workplace) -> None:
        """The work of the request to leave: hand out what the ranks bring, where it differs.

        A name that some rank lacks is passed over: its optimizer is no more, or the rank ends with an error.
        """
        if at.transport.size == 1 or at.equal_counts:
            return
        everyone = at.transport.allgather_object({name: values for name, (values, _) in self.brought.items()})
        for name, (_, tell) in self.brought.items():
            if all(name in theirs for theirs in everyone):
                tell([theirs[name] for theirs in everyone])
