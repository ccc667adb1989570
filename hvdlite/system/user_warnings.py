"""Warnings that point to the user's line, and messages that are logged once."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import cache

OURS = {"hvdlite", "torch", "tensorflow", "keras"}
"""Packages whose frames are not the user's. (Autograd, for example, calls hvdlite's hooks.)"""


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Give a warning that points to the nearest caller outside OURS. Python shows it once for each line."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def deprecated(text: str) -> None:
    """Give a DeprecationWarning, as `warn` does. Python shows it if it points to the user's script."""
    warn(text, DeprecationWarning)


@cache
def say_once(message: str) -> None:
    """Log a warning once in this process. For warnings that no line of the user's script causes."""
    logging.getLogger("hvdlite").warning(message)
