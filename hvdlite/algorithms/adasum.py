"""Adasum: adds what two gradients have in common once and what they do not twice (Maleki et al. 2020).

    a, b  ->  (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b

Orthogonal gradients are added, equal ones averaged. Ranks pair up at distance 1, 2, 4, ... and combine what they have.
"""

from __future__ import annotations

import numpy as np

from hvdlite.algorithms.reduction import Reduction
from hvdlite.arrays import Array, is_float, module
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
        buffer[...] = combined(buffer, incoming)
        distance *= 2
    reduction.postscale(buffer)


def combined(a: Array, b: Array) -> Array:
    """The rule, in float64 for float64 and in float32 for all others."""
    xp, wide = module(a), np.float64 if a.dtype == np.float64 else np.float32
    exact_a, exact_b = a.astype(np.float64), b.astype(np.float64)
    dot, norm_a, norm_b = (float(xp.dot(x, y)) for x, y in ((exact_a, exact_b), (exact_a, exact_a), (exact_b, exact_b)))
    share_a = 1.0 if norm_a < TINY else 1.0 - dot / (2.0 * norm_a)
    share_b = 1.0 if norm_b < TINY else 1.0 - dot / (2.0 * norm_b)
    return (wide(share_a) * a.astype(wide) + wide(share_b) * b.astype(wide)).astype(a.dtype)
