"""The functions of adapters that a job calls when it begins and when it ends.

An adapter registers them when it is imported, which may be long before `init()`.
"""

from __future__ import annotations

from collections.abc import Callable

when_started: list[Callable[[int], None]] = []
"""Called when a job begins, with this process' local rank."""
when_stopped: list[Callable[[], None]] = []
"""Called when a job ends here."""
