"""All-reduce algorithms, and the choice among them.

An algorithm is a function `(transport, buffer, scratch, reduction) -> None`, in place, for a flat contiguous buffer
of any length and any number of ranks; `shared` takes all ranks' buffers instead. `choose` is a pure function of facts
that all ranks share, so that all choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.algorithms.halving_doubling import doubling, halving_doubling
from hvdlite.algorithms.native import native
from hvdlite.algorithms.reduction import Reduction
from hvdlite.algorithms.ring import ring
from hvdlite.algorithms.shared import shared
from hvdlite.arrays import Array, is_small_float
from hvdlite.memory import STAGING_BYTES, Workspace
from hvdlite.transports import Transport

MESSAGES: dict[str, Callable[[Transport, Array, Array, Reduction], None]] = {
    "ring": ring,
    "halving_doubling": halving_doubling,
    "doubling": doubling,
    "native": native,
}
TINY_BYTES, SMALL_BYTES = 2 * 1024, 8 * 1024  # below these the number of steps counts, not the bytes


@dataclass(frozen=True)
class Place:
    """What choosing depends on besides the message; agreed by all ranks of a lane."""

    size: int
    shares_memory: bool
    forced: str = "auto"


def choose(place: Place, nbytes: int, dtype: np.dtype[Any], in_arena: bool) -> str:
    """The algorithm for one all-reduce of nbytes, by name.

    in_arena: whether every rank's buffer lies where its peers can reach it. Elsewhere the two-shot pays for a copy in
    and a copy out, and is worth it only while these stay in the cache.
    """
    can_share = in_arena or (place.shares_memory and nbytes <= STAGING_BYTES)
    if place.forced == "native" and (is_small_float(dtype) or dtype.kind == "b"):
        return "ring"
    if place.forced == "shared":
        return "shared" if can_share else "ring"
    if place.forced != "auto":
        return place.forced
    if in_arena:
        return "shared"
    if nbytes <= TINY_BYTES:
        return "doubling"
    if nbytes <= SMALL_BYTES:
        return "halving_doubling"
    return "shared" if can_share else "ring"


def allreduce(
    transport: Transport,
    workspace: Workspace,
    place: Place,
    buffer: Array,
    reduction: Reduction,
    peers: Sequence[Array] | None = None,
) -> str:
    """Reduce `buffer` (flat, contiguous, in place) over the transport's ranks; returns the algorithm's name.

    peers: all ranks' buffers in rank order, where they lie in an arena; `buffer` is this rank's among them. Every
    rank has finished writing its buffer (the roll call before is that barrier).
    """
    if transport.size == 1:
        reduction.prescale(buffer)
        reduction.postscale(buffer)
        return "alone"
    name = choose(place, buffer.nbytes, buffer.dtype, peers is not None)
    if name != "shared":
        length = buffer.size if "doubling" in name else -(-buffer.size // transport.size)
        MESSAGES[name](transport, buffer, workspace.scratch(buffer, length), reduction)
    elif peers is not None:
        shared(transport, peers, reduction)
    else:
        staged(transport, workspace, buffer, reduction)
    return name


def staged(transport: Transport, workspace: Workspace, buffer: Array, reduction: Reduction) -> None:
    """The two-shot for a buffer that lies elsewhere: copied into the lane's arena and out again.

    Falls back to the ring where the arena could not be shared, which all ranks learned when it was made.
    """
    arena = workspace.staging(transport)
    views = arena.peer_views(0, buffer.size, buffer.dtype)
    if views is None:
        ring(transport, buffer, workspace.scratch(buffer, -(-buffer.size // transport.size)), reduction)
        return
    views[transport.rank][:] = buffer
    transport.barrier()
    shared(transport, views, reduction)
    buffer[:] = views[transport.rank]
