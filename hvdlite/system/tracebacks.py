"""Tracebacks of hvdlite's own errors, as they are printed: the user's frames and the last of ours.

The frames between them, ours and those of libraries that call us (torch's autograd, Keras), mean nothing to users. Who
catches an error, and a debugger, finds its traceback whole: it is short only while it is printed. Rejected: to cut it
where an error leaves a public function, since that loses the frames for good.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from hvdlite.errors import HvdliteError

OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PLACES = (OWN, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))
LIBRARIES = (*(os.path.join(place, "") for place in PLACES), "<frozen")
"""How names of files begin that are not the user's."""


def show(error: BaseException, hook: Callable[[], object]) -> None:
    """Have the hook print an uncaught error, short; at the levels INFO and below of hvdlite's log, whole."""
    if 0 < logging.getLogger("hvdlite").level <= logging.INFO:
        hook()
        return
    with short(error) as left_out:
        hook()
    if left_out:
        whole = "hvdliterun -v, or HVDLITE_LOG_LEVEL=debug, shows them"
        print(f"hvdlite: {left_out} frames inside hvdlite and libraries are left out: {whole}", file=sys.stderr)


@contextmanager
def short(error: BaseException) -> Iterator[int]:
    """Inside, the tracebacks of this error, and of those that it comes from, are short, where they are hvdlite's. Gives
    how many frames are left out."""
    whole = [(each, each.__traceback__) for each in chain(error)]
    left_out = 0
    try:
        for each, traceback in whole:
            frames = list(entries(traceback))
            kept = to_show(each, frames)
            each.__traceback__ = linked(kept)
            left_out += len(frames) - len(kept)
        yield left_out
    finally:
        for each, traceback in whole:
            each.__traceback__ = traceback


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, and those that it comes from, each once."""
    found: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [each.__cause__, each.__context__]
    yield from found.values()


def entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def to_show(error: BaseException, frames: list[TracebackType]) -> list[TracebackType]:
    """The user's frames and the last of ours; all, where the error is not hvdlite's, or none is the user's."""
    own = [frame for frame in frames if file_of(frame).startswith(os.path.join(OWN, ""))]
    users = [frame for frame in frames if not file_of(frame).startswith(LIBRARIES)]
    ours = own and (isinstance(error, HvdliteError) or own[-1] is frames[-1])
    return [frame for frame in frames if frame in users or frame is own[-1]] if ours and users else frames


def file_of(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


def linked(frames: list[TracebackType]) -> TracebackType | None:
    """A traceback of these frames."""
    found: TracebackType | None = None
    for each in reversed(frames):
        found = TracebackType(found, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return found
