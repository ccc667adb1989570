"""Functions that find what the threads of this process execute.

The stall watch's thread calls them for a report. `main_position` gives the innermost line of the user's code in the
main thread. With the other functions, `board` finds the threads that may still call hvdlite.
"""

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
    """The innermost line of the main thread outside of libraries, as in 'train.py:12 in step: loss.backward()'.

    If the thread handles an exception, the text has that, too: a call in a `finally:` delays its traceback.
    """
    main = threading.main_thread().ident or 0
    frame, found = sys._current_frames().get(main), sys._current_exceptions().get(main)
    if frame is None:
        return "the main thread has ended"
    error = found[1] if isinstance(found, tuple) else found  # until Python 3.11 with its type and traceback
    return describe(users_frame(frame) or frame) + (f" (because of {in_words(error)})" if error else "")


def threads_of_users() -> set[int]:
    """The threads that run the user's code, and so may call hvdlite.

    A thread that only runs a library's code does not count: a DataLoader's helper, or an idle worker of a pool.
    """
    return {thread for thread, frame in sys._current_frames().items() if users_frame(frame) is not None}


def threads_in_steps() -> set[int]:
    """The threads that wait for a step of TensorFlow, which runs in other threads."""
    return {thread for thread, frame in sys._current_frames().items() if frame.f_code.co_filename.endswith(STEP)}


def own_threads() -> set[int]:
    """The threads that Python has started."""
    return {each.ident for each in threading.enumerate() if not isinstance(each, threading._DummyThread) and each.ident}


def users_frame(frame: FrameType) -> FrameType | None:
    """The frame itself or its nearest caller in the user's code; None if there is none."""
    found: FrameType | None = frame
    while found is not None and found.f_code.co_filename.startswith(LIBRARIES):
        found = found.f_back
    return found


def in_words(error: BaseException) -> str:
    """The exception's type and first line, as in 'ValueError: no such file'."""
    text = ""
    with contextlib.suppress(Exception):  # the class may be the user's
        text = str(error).partition("\n")[0][:LONGEST_LINE]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def describe(frame: FrameType) -> str:
    """File, line number, function, and the text of the line. Files below the working directory have relative paths."""
    path, number = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, number).strip()[:LONGEST_LINE]
    try:
        here = os.path.join(os.getcwd(), "")
    except OSError:  # the directory has been removed
        here = ""
    where = f"{path.removeprefix(here)}:{number} in {frame.f_code.co_name}"
    return f"{where}: {text}" if text else where
