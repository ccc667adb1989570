"""Warnings that point to the line of the user's code that they are about; others, in the log, once."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import cache

OURS = {"hvdlite", "torch", "tensorflow", "keras"}
"""Packages whose own lines tell the user nothing: a hook is called by autograd."""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """For the nearest caller outside these packages; Python shows each line's once."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def deprecated(text: str) -> None:
    """A DeprecationWarning, of which Python shows those of the user's script."""
    warn(text, DeprecationWarning)


@cache
def say_once(message: str) -> None:
    """In the log, for what no line of the user's is to blame."""
    logging.getLogger("hvdlite").warning(message)
