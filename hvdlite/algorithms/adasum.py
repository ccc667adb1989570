"""Adasum: adds what two gradients have in common once and what they do not twice (Maleki et al. 2020).

    a, b  ->  (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, equal ones averaged. Ranks pair up at distance 1, 2, 4, ... and combine what they have.
"""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms.reduction import Reduction, assign, in_cache, widened
from hvdlite.arrays import Array, is_float
from hvdlite.errors import HvdliteError
from hvdlite.transports import Transport

TINY = float(np.sqrt(np.finfo(np.float64).tiny))  # a squared norm below it is that of nothing


def adasum(transport: Transport, buffer: Array, scratch: Array, reduction: Reduction) -> None:
    """Recursive doubling with the rule above. log2(p) steps, n log2(p) elements sent per rank.

    buffer: flat, contiguous, one tensor of any length n, changed in place. scratch: flat, same dtype, length >= n.
    The number of ranks is a power of two. Products and norms are computed in float64. The rule is symmetric to the
    last bit, so partners, and in the end all, have the same bits. Raises HvdliteError for dtypes other than floats.
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
    """The rule, into a; for 16-bit floats in float32."""
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
    """a.b, a.a and b.b in float64. NumPy's sums: the order of BLAS's depends on the CPU and the number of threads, in
    which hosts differ."""
    found = [0.0, 0.0, 0.0]
    for each, other in in_cache(a, b):
        x, y = widened(each).astype(np.float64, copy=False), widened(other).astype(np.float64, copy=False)
        for place, factors in enumerate(((x, y), (x, x), (y, y))):
            found[place] += float((factors[0] * factors[1]).sum())
    return found[0], found[1], found[2]
