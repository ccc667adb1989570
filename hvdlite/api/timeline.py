"""Switching the timeline on and off while a job runs. See `hvdlite.observers.timeline` for what it shows."""

from __future__ import annotations

from hvdlite.job import runtime


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what happens to each tensor, in file_path, until `stop_timeline` or `shutdown`. Rank 0 writes; on other
    ranks it does nothing. A timeline that runs already goes on if its file is the same, and is stopped if not.

    mark_cycles: also mark where the next operation begins. Raises ValueError before `init()`, and where
    HOROVOD_TIMELINE (or HVDLITE_TIMELINE) was not set then; set it to DYNAMIC to start later. A file that cannot be
    written is told of in the log.
    """
    live = runtime.current()
    if not live.config.timeline.path:
        raise ValueError("start_timeline: set HVDLITE_TIMELINE=DYNAMIC (or HOROVOD_TIMELINE) in the job's environment")
    live.trace(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the file and close it. Without a timeline nothing happens. Raises ValueError before `init()`."""
    runtime.current().trace(None)
