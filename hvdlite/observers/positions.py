"""Where Python is: the line of the user's code that a process executes or waits in, found from another thread."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from types import FrameType

from hvdlite.system.tracebacks import LIBRARIES

LONGEST_LINE = 100
STEP = os.path.join("tensorflow", "python", "eager", "execute.py")


def main_position() -> str:
    """'train.py:12 in step: loss.backward()': the innermost line of the main thread that is no library's; and what is
    wrong there, which a call in a `finally:` keeps from being told."""
    main = threading.main_thread().ident or 0
    frame, found = sys._current_frames().get(main), sys._current_exceptions().get(main)
    if frame is None:
        return "the main thread has ended"
    error = found[1] if isinstance(found, tuple) else found  # until Python 3.11 with its type and traceback
    return describe(users_frame(frame) or frame) + (f" (because of {told(error)})" if error else "")


def threads_of_users() -> set[int]:
    """The threads that run code of the user's: one that has never called may yet do so. (What only a library runs in,
    as a DataLoader's helper or a pool's worker without work, may not.)"""
    return {thread for thread, frame in sys._current_frames().items() if users_frame(frame) is not None}


def threads_in_steps() -> set[int]:
    """The threads that wait for a step of TensorFlow's, which runs in threads of its own."""
    return {thread for thread, frame in sys._current_frames().items() if frame.f_code.co_filename.endswith(STEP)}


def own_threads() -> set[int]:
    """Those that Python has started."""
    return {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread) and each.ident}


def users_frame(frame: FrameType) -> FrameType | None:
    """The frame itself or the nearest caller that is user code; None where there is none."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(LIBRARIES):
        found = found.f_back
    return found


def told(error: BaseException) -> str:
    """'ValueError: no such file'."""
    text = ""
    with contextlib.suppress(Exception):  # of a class of the user's
        text = str(error).partition("\n")[0][:LONGEST_LINE]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe(frame: FrameType) -> str:
    """File (relative to the working directory where it lies below it), line, function, and the line's text."""
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number).strip()[:LONGEST_LINE]
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # it has been removed
        here = ""
    where = f"{path.removeprefix(here)}:{number} in {frame.f_code.co_name}"
    return f"{where}: {text}" if text else where
