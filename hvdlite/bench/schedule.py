"""The best schedule of gradients during backward: it shows the communication that no implementation can hide.

    backward            |     5     |     4     |     3     |     2     |     1     |
    at best                         |==5==|     |==4==|     |==3==|     |==2==|     |==1==|

Each gradient leaves once backward has it and the previous one has been sent. It takes its share of the communication's
time. The last gradient is never hidden, and other late gradients are not either.
"""

from __future__ import annotations

from collections.abc import Sequence


def least_exposed(nbytes: Sequence[int], arrivals: Sequence[float], communication: float) -> float:
    """The least time of communication after backward has its last gradient, in seconds.

    Args:
        nbytes: The size of each gradient.
        arrivals: The time at which backward has each gradient, in seconds.
        communication: The time that all bytes take, in seconds.
    """
    end, rate = 0.0, sum(nbytes) / communication
    for arrival, size in sorted(zip(arrivals, nbytes, strict=True)):
        end = max(end, arrival) + size / rate
    return end - max(arrivals)
