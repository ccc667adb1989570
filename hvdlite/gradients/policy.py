"""How large buckets are, and when they leave: what the settings and the network make of a list of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hvdlite.algorithms import Place
from hvdlite.config import Config
from hvdlite.gradients.plan import BucketPlan, Spec, plan

USUAL_BUCKET = 25 << 20  # bytes
FIRST_BUCKET = 1 << 20  # bytes; small, so that communication starts early
SHORTEST_BUCKET = 384 * 1024  # bytes; 3 ms at 1 Gbit/s, where a bucket takes the lane 0.3 ms of a core besides
LAST_BUCKET = 64 * 1024  # bytes; as long on that wire as its request takes


def planned(
    specs: Iterable[Spec], config: Config, place: Place, order: Sequence[int] | None = None
) -> tuple[BucketPlan, bool | None]:
    """The plan for these parameters, and whether its buckets leave during backward (None: to be tried). order: in which
    backward has their gradients, where that is known.

    Then, unless the user gave their size, they are a sixteenth of the gradients, no longer than usual, nor so short
    that latency counts (SHORTEST_BUCKET); and the last, which nothing can hide, is shorter yet (LAST_BUCKET).
    """
    specs = tuple(specs)
    on_gpu = any(spec.device != "host" for spec in specs)
    overlap, most = overlap_pays(config.overlap, place, on_gpu), config.bucket_bytes or USUAL_BUCKET
    if overlap is not False and config.bucket_bytes is None:
        total = sum(spec.length * np.dtype(spec.dtype).itemsize for spec in specs)
        most = min(most, max(total // 16, SHORTEST_BUCKET))
    last = 0 if overlap is False else min(most, LAST_BUCKET)
    return plan(specs, most, min(most, FIRST_BUCKET), last, order), overlap


def overlap_pays(setting: str, place: Place, on_gpu: bool) -> bool | None:
    """Whether buckets leave during backward; None: to be tried. setting: '0', '1', or 'auto': from GPUs, whose cores
    the lane does not take, but not among the CPUs of one host; over a network what is faster."""
    if setting != "auto":
        return setting == "1"
    if on_gpu:
        return True
    return False if place.one_host and place.shares_memory else None
