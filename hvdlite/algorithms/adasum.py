"""Adasum: add what two gradients have in common once, and the rest twice (Maleki et al. 2020).

    a, b  ->  (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

Price: log2(p) steps; each rank sends n log2(p) elements. Orthogonal gradients are added, equal ones are averaged. Ranks
pair up at distance 1, 2, 4, ... and combine their results.
"""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms.reduction import Reduction, assign, in_cache, widened
from hvdlite.arrays import Array, is_float
from hvdlite.errors import HvdliteError
from hvdlite.transports import Transport

TINY = float(np.sqrt(np.finfo(np.float64).tiny))  # a smaller squared norm counts as zero


def adasum(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """Recursive doubling with the rule above. Log2(p) steps; each rank sends n log2(p) elements.

    The rule is symmetric to the last bit, so that partners, and in the end all ranks, have the same bits. Products and
    norms are computed in float64.

    Args:
        transport: A power of two of ranks.
        buffer: One tensor of any length n, flat and contiguous, changed in place.
        scratch: Flat, same dtype, at least n elements.
        reduction: Its scaling.

    Raises:
        HvdliteError: The dtype is not a float.
    """
    if not is_float(buffer.dtype):
        raise HvdliteError(f"op=Adasum is for floating-point tensors, not {buffer.dtype}")
    assert transport.size & (transport.size - 1) == 0
    reduction.prescale(buffer)
    incoming, distance = scratch[: buffer.size], 1
    while distance < transport.size:
        partner = transport.rank ^ distance
        transport.exchange(buffer, partner, incoming, partner)
        combine(buffer, incoming)
        distance *= 2
    reduction.postscale(buffer)


def combine(a: Array, b: Array) -> None:
    """Apply the rule, into a. 16-bit floats are computed in float32."""
    dot, norm_a, norm_b = products(a, b)
    share_a = 1.0 if norm_a < TINY else 1.0 - dot / (2.0 * norm_a)
    share_b = 1.0 if norm_b < TINY else 1.0 - dot / (2.0 * norm_b)
    for mine, theirs in in_cache(a, b):
        wide, other = widened(mine), widened(theirs)
        wide *= wide.dtype.type(share_a)
        other *= wide.dtype.type(share_b)
        wide += other
        assign(mine, wide)


def products(a: Array, b: Array) -> tuple[float, float, float]:
    """a.b, a.a and b.b in float64.

    NumPy's sums, because the order of BLAS's depends on the CPU and the number of threads, which differ between hosts.
    """
    found = [0.0, 0.0, 0.0]
    for each, other in in_cache(a, b):
        x, y = widened(each).astype(np.float64, copy=False), widened(other).astype(np.float64, copy=False)
        for place, factors in enumerate(((x, y), (x, x), (y, y))):
            found[place] += float((factors[0] * factors[1]).sum())
    return found[0], found[1], found[2]
