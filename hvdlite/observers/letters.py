"""The letters that stall watches of different ranks send each other: Alarm, Heard, Ask, Answer, End.

`stall` shows their order.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.observers.diagnosis import Report


@dataclass(frozen=True)
class Alarm:
    """A rank has waited for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Heard:
    """The answer to an Alarm: the sender asks all ranks."""


@dataclass(frozen=True)
class Ask:
    """The request for a report."""

    serial: int


@dataclass(frozen=True)
class Answer:
    """The report that the Ask of this serial number has asked for."""

    serial: int
    report: Report


@dataclass(frozen=True)
class End:
    """The job ends: `text` is the error of all pending calls."""

    text: str
