"""Short tracebacks for hvdlite's errors: printed tracebacks show the user's frames and hvdlite's last frame.

The frames between, of hvdlite and of libraries that call it (torch's autograd, Keras), mean nothing to users. A
traceback is short only while it is printed: code that catches an error, and a debugger, find all frames. Rejected: to
cut the traceback when an error leaves a public function, because then the frames would be lost.
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
"""The begins of the names of all files that are not the user's."""


def show(error: BaseException, hook: Callable[[], object]) -> None:
    """Call the hook, which prints an uncaught error. The traceback is whole if hvdlite logs INFO, else short."""
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
    """A context in which the tracebacks of hvdlite's errors are short: of this error, its causes and contexts.

    Yields the number of frames that are left out.
    """
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
    """The error, its causes and contexts, each once."""
    found: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        each = waiting.pop()
        if each is not None and id(each) not in found:
            found[id(each)] = each
            waiting += [each.__cause__, each.__context__]
    yield from found.values()


def entries(traceback: TracebackType | None) -> Iterator[TracebackType]:
    """The frames of a traceback, the outermost first."""
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def to_show(error: BaseException, frames: list[TracebackType]) -> list[TracebackType]:
    """The user's frames and hvdlite's last one. All frames, if the error is not hvdlite's or no frame is the user's."""
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
