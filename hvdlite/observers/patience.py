"""When the stall watch looks, when it asks the other ranks, and when it may report again."""

from __future__ import annotations

from dataclasses import dataclass

TICK = 0.2  # seconds between looks, at most
BUSY_TICK = 0.01  # the same while letters are under way


@dataclass(frozen=True)
class Limits:
    """Seconds of waiting.

    Attributes:
        check: After this time the ranks report.
        shutdown: After this time the job ends; infinite: never.
    """

    check: float
    shutdown: float

    @property
    def tick(self) -> float:
        """The usual time between two looks."""
        return min(TICK, self.check / 20)


class Patience:
    """The times of one rank's stall watch.

    Attributes:
        limits: The limits of waiting.
        quiet_until: No alarm before this time.
        reported_at: When this rank last printed a report.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.quiet_until = 0.0
        self.reported_at = -float("inf")

    def pause(self, waited: float) -> float:
        """Seconds until the next look: fewer if a wait of `waited` seconds soon reaches the limit."""
        due = self.limits.check - waited
        return min(self.limits.tick, max(due, BUSY_TICK)) if due > 0 else self.limits.tick

    def is_over(self, waited: float, now: float) -> bool:
        """Whether a wait of `waited` seconds is a reason for an alarm."""
        return now >= self.quiet_until and waited >= self.limits.check

    def note_alarm(self, waited: float, now: float) -> None:
        """An alarm begins. The next one comes after `check` seconds, or when the wait reaches `shutdown`."""
        left = self.limits.shutdown - waited
        self.quiet_until = now + (min(self.limits.check, left) if left > 0 else self.limits.check)

    def needs_inquiry(self, waited: float, now: float) -> bool:
        """Whether to ask all ranks: not if this rank has reported lately, unless the job may have to end."""
        return now - self.reported_at >= self.limits.check / 2 or waited >= self.limits.shutdown

    def note_report(self, now: float) -> None:
        """This rank prints a report."""
        self.reported_at = now
