"""Raises KeyboardInterrupt, as Ctrl-C would, at any line of a function."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def raising_at(function: Callable[..., Any], line: int) -> Iterator[None]:
    """A context in which one line of a function raises KeyboardInterrupt, once."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno == line:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace if frame.f_code is function.__code__ else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)
