"""`hvd.seed`: one call seeds Python, NumPy and every framework that is imported."""

from __future__ import annotations

import operator
import random
import sys
from typing import SupportsIndex

import numpy as np

from hvdlite.job import runtime

SEEDERS = {"torch": "manual_seed", "tensorflow": "random.set_seed", "keras": "utils.set_random_seed"}
"""By framework, its function that seeds its global generators, on GPUs too."""
LARGEST = 2**32 - 1


def seed(n: SupportsIndex, per_rank: bool = False) -> int:
    """Seed the global random number generators of Python, NumPy and every framework that is imported.

    The frameworks are PyTorch (CUDA, too), TensorFlow and Keras. Call this after their imports, and before the model is
    made. It is not collective. A DataLoader from `hvd.shard` shuffles by the `seed=` of `hvd.shard`.
    Random splits of the data must be alike on all ranks: make them before a call with `per_rank`.

        hvd.seed(42)                    # the same model and shuffling on all ranks
        hvd.seed(42, per_rank=True)     # other dropout and augmentation on each rank

    Args:
        n: The seed, from 0 to 2**32 - 1.
        per_rank: Whether each rank gets a seed of its own. It is a hash of `n` and the rank:
            `numpy.random.SeedSequence(n, spawn_key=(rank,)).generate_state(1)[0]`. So ranks of runs with the seeds 1
            and 2 do not share seeds, as they would with n + rank. It needs `hvd.init()`.

    Returns:
        The seed that was used.

    Raises:
        ValueError: `n` is negative or too large.
        NotInitializedError: `per_rank` is given before `hvd.init()`.
    """
    given = operator.index(n)
    if not 0 <= given <= LARGEST:
        raise ValueError(f"hvd.seed({n!r}): a seed is from 0 to 2**32 - 1, because NumPy and Keras take no other")
    used = seed_of(given, runtime.rank()) if per_rank else given
    random.seed(used)
    np.random.seed(used)
    for framework, function in SEEDERS.items():
        if (module := sys.modules.get(framework)) is not None:
            operator.attrgetter(function)(module)(used)
    return used


def seed_of(n: int, rank: int) -> int:
    """Return the seed of a rank."""
    return int(np.random.SeedSequence(n, spawn_key=(rank,)).generate_state(1)[0])
