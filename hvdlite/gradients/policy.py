"""The size of buckets and the time when they leave, from the settings, the network and the gradients.

In the walk of a gradient, `planned` comes first: an optimizer or an exchange calls it with its parameters, and gives
the plan to a new reducer. All inputs are the same on all ranks, and so are the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hvdlite.algorithms import Place
from hvdlite.config import Config
from hvdlite.gradients.plan import BucketPlan, Spec, plan

USUAL_BUCKET = 25 << 20  # bytes
FIRST_BUCKET = 1 << 20  # bytes; small, so that communication starts early
SHORTEST_BUCKET = 384 * 1024  # bytes; 3 ms at 1 Gbit/s, while a bucket takes the lane 0.3 ms of a core
LAST_BUCKET = 64 * 1024  # bytes; at 1 Gbit/s they take as long as their request


def planned(
    specs: Iterable[Spec], config: Config, place: Place, order: Sequence[int] | None = None
) -> tuple[BucketPlan, bool | None]:
    """Plan buckets for these parameters, and decide whether they leave during backward.

    If buckets may leave early and the user gave no size, a bucket has a sixteenth of all gradients. It then has at most
    USUAL_BUCKET bytes, and at least SHORTEST_BUCKET, below which latency counts. No backward hides the last bucket, so
    the last bucket is shorter (LAST_BUCKET).

    Args:
        specs: The parameters.
        config: The settings for bucket size and overlap.
        place: The ranks and hosts.
        order: The parameters' indices in the order in which backward has their gradients; None: not known.

    Returns:
        The plan, and whether buckets leave during backward; None: a trial decides (`overlap_trial`).
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
    """Decide whether buckets leave during backward; None: a trial decides.

    With 'auto', gradients on a GPU leave early, because the lane takes no core from the GPU. Among the CPUs of one host
    they leave at the end. Over a network the trial decides.

    Args:
        setting: HVDLITE_OVERLAP: '0', '1' or 'auto'.
        place: The ranks and hosts.
        on_gpu: Whether any gradient lies on a GPU.
    """
    if setting != "auto":
        return setting == "1"
    if on_gpu:
        return True
    return False if place.one_host and place.shares_memory else None
