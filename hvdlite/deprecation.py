"""Arguments that Horovod has given up, told of at the line of the user's code that has them."""

from __future__ import annotations

import os
import sys
import warnings

OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


def deprecated(text: str) -> None:
    """A DeprecationWarning for the nearest caller outside hvdlite: Python shows it where that is the user's script."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, DeprecationWarning, stacklevel=level)
