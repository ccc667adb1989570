"""The best schedule of gradients during backward: the communication that no implementation can hide.

    backward            |     5     |     4     |     3     |     2     |     1     |
    at best                         |==5==|     |==4==|     |==3==|     |==2==|     |==1==|

Each gradient leaves once backward has it, one after another, for its share of the communication's time. The last one
never hides, nor do several that come late.
"""

from __future__ import annotations

from collections.abc import Sequence


def least_exposed(nbytes: Sequence[int], arrivals: Sequence[float], communication: float) -> float:
    """Seconds that communication goes on after the last gradient has come, at best.

    nbytes, arrivals: of each gradient, the latter in seconds. communication: seconds that all bytes take.
    """
    end, rate = 0.0, sum(nbytes) / communication
    for arrival, size in sorted(zip(arrivals, nbytes, strict=True)):
        end = max(end, arrival) + size / rate
    return end - max(arrivals)
