"""Switching the timeline on and off while a job runs. `hvdlite.observers.timeline` describes what it shows."""

from __future__ import annotations

from hvdlite.job import runtime


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record what happens to each tensor until `stop_timeline` or `shutdown`.

    Rank 0 writes the file; on other ranks the call does nothing. A running timeline goes on if its file is the same,
    and else ends. If the file cannot be written, rank 0 logs an error.

    Args:
        file_path: The file.
        mark_cycles: Whether to mark the beginning of each operation.

    Raises:
        NotInitializedError: `init()` has not been called.
        ValueError: Neither HOROVOD_TIMELINE nor HVDLITE_TIMELINE was set when `init()` was called. DYNAMIC allows a
            timeline to start later.
    """
    live = runtime.current()
    if not live.config.timeline.path:
        raise ValueError("start_timeline: set HVDLITE_TIMELINE=DYNAMIC (or HOROVOD_TIMELINE) in the job's environment")
    live.trace(file_path, mark_cycles)


def stop_timeline() -> None:
    """Complete the timeline's file and close it, if there is one. Raises NotInitializedError before `init()`."""
    runtime.current().trace(None)
