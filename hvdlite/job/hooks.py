"""Two lists of functions that a job calls: `when_started` at its beginning, `when_stopped` at its end.

Modules add their functions at import, or when a user attaches an optimizer. That may be long before `init()`.
"""

from __future__ import annotations

from collections.abc import Callable

when_started: list[Callable[[int], None]] = []
"""Called when a job begins, with this process' local rank."""
when_stopped: list[Callable[[], None]] = []
"""Called when a job ends here."""
