"""Which algorithm: a pure function of facts that all ranks share, so that all choose alike.

The model, per all-reduce of S bytes (Hockney's: a message of m bytes takes a + m b; M: bytes/s of a host's memory;
p ranks on h hosts, L per host, all drivers of a host behind one network card):

    ring                2(p-1) a             + 2S (p-1)/p b          the card carries this once: neighbours on a host
    halving-doubling    2 log2(p) a          + 2S (p-1)/p b x L      its far exchanges leave every rank of the host
    doubling              log2(p) a          + S log2(p) b x L
    shared two-shot     a barrier            + 2 L S / M
    hierarchical        2(h-1) a or 2 log2(h) a + 2S (h-1)/h b + 2 L S / M

So: within a host always share memory; between hosts the hierarchical, whose bytes per card are the least possible;
between its drivers halving-doubling until a ring's steps are filled. With a = 30 us and 1/b = 1-12 GB/s a step is
filled from 30-360 KB on; 64 KiB is the compromise. Where memory is not shared the same rule holds for all ranks.
`python -m hvdlite.bench model` prints and plots it for 8 to 4096 ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.arrays import is_small_float
from hvdlite.memory import staging_bytes

TINY_BYTES, SMALL_BYTES = 2 * 1024, 8 * 1024  # on one host; below these the number of steps counts, not the bytes
STEP_BYTES = 64 * 1024  # over a network; a ring whose messages are shorter waits for latency more than for bytes


@dataclass(frozen=True)
class Place:
    """What choosing depends on besides the message; agreed by all ranks of a lane.

    shares_memory: ranks of one host may look into each other's buffers, and some host has several. hosts: the lane's
    ranks on each host; empty where all are on one.
    """

    size: int
    shares_memory: bool
    forced: str = "auto"
    hosts: tuple[tuple[int, ...], ...] = ()

    @property
    def one_host(self) -> bool:
        return len(self.hosts) < 2


def choose(place: Place, nbytes: int, dtype: np.dtype[Any], in_arena: bool) -> str:
    """The algorithm for one all-reduce of nbytes, by name.

    in_arena: whether every rank's buffer lies where its host's ranks can reach it. Elsewhere the two-shot pays for a
    copy in and a copy out: on one host it is worth that only while these stay in the cache, over a network always.
    """
    together = "shared" if place.one_host else "hierarchical"
    can_share = in_arena or (place.shares_memory and (nbytes <= staging_bytes(place.hosts) or not place.one_host))
    if place.forced == "native" and (is_small_float(dtype) or dtype.kind == "b"):
        return "ring"
    if place.forced in ("shared", "hierarchical"):
        return together if can_share else "ring"
    if place.forced != "auto":
        return place.forced
    if in_arena:
        return together
    if nbytes <= TINY_BYTES:
        return "doubling"
    if nbytes <= SMALL_BYTES:
        return "halving_doubling"
    if can_share:
        return together
    return "ring" if place.one_host else across(place.size, nbytes)


def across(ranks: int, nbytes: int) -> str:
    """The algorithm among ranks on as many hosts, by messages."""
    if nbytes <= TINY_BYTES:
        return "doubling"
    power_of_two = ranks & (ranks - 1) == 0  # else the folded ranks send everything twice more
    return "halving_doubling" if nbytes < ranks * STEP_BYTES and (power_of_two or nbytes <= STEP_BYTES) else "ring"
