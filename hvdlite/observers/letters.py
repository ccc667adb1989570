"""What stall watches write to each other; `stall` says when."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.observers.diagnosis import Report


@dataclass(frozen=True)
class Alarm:
    """I have waited for `seconds`."""

    seconds: float


@dataclass(frozen=True)
class Heard:
    """Your alarm is seen to."""


@dataclass(frozen=True)
class Ask:
    """How are you?"""

    serial: int


@dataclass(frozen=True)
class Answer:
    serial: int
    report: Report


@dataclass(frozen=True)
class End:
    """Give up: `text` is the error."""

    text: str
