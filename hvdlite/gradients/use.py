"""`Use`: the kind of gradient that a rank has for one parameter in a round.

A parameter may have a gradient on some ranks only. At the end of a round the ranks agree on the largest use of each
parameter (`Reducer.finish_round`), and all ranks give their parameters gradients of that kind.
"""

from __future__ import annotations

from enum import IntEnum


class Use(IntEnum):
    """What a rank has for a parameter in a round. The largest value over all ranks counts."""

    UNUSED = 0
    """No gradient."""
    DENSE = 1
    """A dense gradient."""
    DENSIFIED = 2
    """A sparse gradient that travels dense. Every rank gets a sparse one back."""
    SPARSE = 3
    """A sparse gradient. Its rows and values are gathered (`sparse`)."""
