"""A rank that learned that another one has left, and went on as if all were well.

A script's `except RuntimeError:` around a batch, meant for a GPU without memory, catches ShutdownError too. Such a rank
ends with exit code 0, though it has not trained with the others. So its end says what it caught: see
`exits.tell_of_swallowed`. `hvd.init()` after the error is a recovery, and nothing is said.
"""

from __future__ import annotations

import os
import threading

from hvdlite.errors import ShutdownError

rank = 0
"""This process' number in the job that is watched, or was last."""
_watching = False
_first: tuple[int, str] | None = None
"""The first such error: the process that got it, and its words."""


def watch(mine: int) -> None:
    """Communication has begun, in which this is rank `mine`: what was before is over."""
    global _watching, rank
    _watching, rank = True, mine
    forget()


def forget() -> None:
    """What was raised has turned out to be harmless."""
    global _first
    _first = None


def leave() -> None:
    """This process shuts down itself: what its threads that still communicate are told is no failure."""
    global _watching
    _watching = False


def raised(error: BaseException) -> None:
    """Note an error that a caller is about to get. A daemon thread may communicate until others end: it is no failure.
    (Python takes a framework's own threads for daemons.)"""
    global _first
    if not (_watching and isinstance(error, ShutdownError) and error.by_another and _first is None):
        return
    thread = threading.current_thread()
    if not thread.daemon or isinstance(thread, threading._DummyThread):
        _first = os.getpid(), str(error)


def found() -> str | None:
    """What this process was told, unless it has recovered."""
    return _first[1] if _first and _first[0] == os.getpid() else None
