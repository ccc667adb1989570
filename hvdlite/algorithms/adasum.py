"""Adasum (op=hvd.Adasum) adds two gradients, and counts their common part once (Maleki et al. 2020).

    a, b  ->  (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, and equal ones are averaged. Ranks pair up at distance 1, 2, 4, ... and combine their
results. The number of ranks must be a power of two. Price: log2(p) steps; each rank sends n log2(p) elements.
"""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms.reduction import Reduction, assign, in_cache, widened
from hvdlite.arrays import Array, is_float
from hvdlite.errors import HvdliteError
from hvdlite.transports import Transport

TINY = float(np.sqrt(np.finfo(np.float64).tiny))  # smaller squared norms count as zero


def adasum(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """Reduce by recursive doubling with the rule above. log2(p) steps; each rank sends n log2(p) elements.

    The rule is symmetric to the last bit. So partners have the same bits after each step, and all ranks at the end.
    Products and norms are computed in float64.

    Args:
        transport: A power of two of ranks.
        buffer: One tensor of any length n, flat and contiguous, changed in place.
        scratch: Flat, same dtype, at least n elements.
        reduction: The scaling.

    Raises:
        HvdliteError: The dtype is not a floating-point type.
    """
    if not is_float(buffer.dtype):
        raise HvdliteError(f"op=Adasum is for floating-point tensors, not {buffer.dtype}: use op=Sum, or cast first")
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
    """Write the rule's result for a and b into a. 16-bit floats are computed in float32."""
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

    With NumPy's sums. The order of BLAS's sums depends on the CPU and its threads, which may differ between hosts.
    """
    found = [0.0, 0.0, 0.0]
    for each, other in in_cache(a, b):
        x, y = widened(each).astype(np.float64, copy=False), widened(other).astype(np.float64, copy=False)
        for place, factors in enumerate(((x, y), (x, x), (y, y))):
            found[place] += (factors[0] * factors[1]).sum().item()
    return found[0], found[1], found[2]
