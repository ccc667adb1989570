"""Notes a ShutdownError that the script has caught and ignored.

A script's `except RuntimeError:` around a batch, meant for a GPU without memory, catches ShutdownError, too. The rank
then ends with exit code 0, though it did not train with the others. So the rank's end reports the error
(`exits.tell_of_swallowed`). A `hvd.init()` after the error is a recovery, and nothing is reported.
"""

from __future__ import annotations

import os
import threading

from hvdlite.errors import ShutdownError

rank = 0
"""This process' rank in the current or last job."""
_watching = False
_first: tuple[int, str] | None = None
"""The first such error: the process that got it, and its text."""


def watch(mine: int) -> None:
    """Start watching: communication begins, with this process as rank `mine`."""
    global _watching, rank
    _watching, rank = True, mine
    forget()


def forget() -> None:
    """Drop the noted error: it was harmless."""
    global _first
    _first = None


def leave() -> None:
    """Stop watching: this process shuts down itself, so later errors of its threads are no failures."""
    global _watching
    _watching = False


def raised(error: BaseException) -> None:
    """Note an error that a caller is about to get.

    Errors in daemon threads are not noted, because these may communicate until other ranks end. (Python calls a
    framework's own threads daemons as well, but these count.)
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
