"""How an optimizer's parameters can be divided, and the shapes of the trial that finds it out for an unknown class.

The trial: three steps on random data, whole and in pieces. The adapters make it, with their framework's optimizer.
"""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """How an optimizer's parameters can be divided among ranks."""

    ELEMENTS = "by elements"
    TENSORS = "by whole tensors"


SHAPE = (8, 24)
"""The shape of the trial's parameters."""
ELEMENTS_CUT = 64
"""Where the trial cuts them: at a cache line, in the midst of a row."""
