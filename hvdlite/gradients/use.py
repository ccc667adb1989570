"""What a rank contributes for one parameter of a round."""

from __future__ import annotations

from enum import IntEnum


class Use(IntEnum):
    """What a rank has for a parameter in a round; ranks agree on the largest."""

    UNUSED = 0
    DENSE = 1
    DENSIFIED = 2
    """Sparse, but travelling dense: every rank gets a sparse one back."""
    SPARSE = 3
