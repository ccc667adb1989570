"""A record of the first ShutdownError that the script has caught and ignored.

A script's `except RuntimeError:` around a batch, meant for a GPU that is out of memory, catches ShutdownError, too.
Then the rank would end with exit code 0, though it has not trained with the others. So this rank reports the error when
it ends (`exits.report_swallowed`). If the script calls `hvd.init()` after the error, it has recovered, and nothing is
reported.
"""

from __future__ import annotations

import os
import threading

from hvdlite.errors import ShutdownError

rank = 0
"""This process' rank in the current or last job."""
_watching = False
_first: tuple[int, str] | None = None
"""The process that got the error, and the error's text; None if there is none."""


def watch(mine: int) -> None:
    """Start watching, because communication begins. mine: this process' rank."""
    global _watching, rank
    _watching, rank = True, mine
    forget()


def forget() -> None:
    """Drop the noted error, because the script has recovered from it."""
    global _first
    _first = None


def leave() -> None:
    """Stop watching, because this process shuts down. Later errors of its threads are no failures."""
    global _watching
    _watching = False


def raised(error: BaseException) -> None:
    """Note an error that is about to be raised to a caller.

    Errors in daemon threads are not noted, because these threads may communicate until other ranks end. Errors in
    threads that a framework started are noted, although Python marks these threads as daemons.
    """
    global _first
    if not (_watching and isinstance(error, ShutdownError) and error.by_another and _first is None):
        return
    thread = threading.current_thread()
    if not thread.daemon or isinstance(thread, threading._DummyThread):
        _first = os.getpid(), str(error)


def found() -> str | None:
    """The text of the noted error; None if there is none."""
    return _first[1] if _first and _first[0] == os.getpid() else None
